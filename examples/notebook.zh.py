# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 记忆的价值
#
# 语言模型按**片段**（segment）阅读文本，因为若让注意力覆盖整本书，计算量实在太大。普通的 Transformer 一跨过片段边界，前面的内容就全忘了。[Transformer-XL](https://arxiv.org/abs/1901.02860) 则把上一个片段的隐藏状态（hidden state）保留下来，作为**记忆**（memory）；读下一个片段时，注意力仍能看到它们。
#
# 在这个笔记本里，我们从头训练这样一个模型，让它生成文本，然后拿走它的记忆、拉长它的记忆，看看各个注意力头（attention head）在看哪里，最后保存一个会话，再接着读下去。所有数字都由代码单元格算出，所以你得到的结果会与别人的略有不同。代码与英文版相同，因此输出和图中的文字都是英文；它们的意思，写在每张图的前面。
#
# 如果环境变量 `TXL_DATA` 所指的目录中有 `tinyshakespeare/input.txt`，训练文本就用莎士比亚剧本集 Tiny Shakespeare；否则用 Python 标准库的源代码，它已经在你的机器上了。

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import transformer_xl as txl

shakespeare = Path(os.environ.get("TXL_DATA", "."), "tinyshakespeare")
is_play = shakespeare.is_dir()
steps = os.environ.get("TXL_STEPS")  # set it to train for a few steps only, to try the notebook itself

# %% [markdown]
# ## 训练
#
# 配方（recipe）`shakespeare-small` 是论文模型的缩小版，配上了如今常用的优化器。模型按字节阅读：一个词元（token）就是一个字节，也就是一个英文字符。训练只需几分钟。
#
# 训练结果放在 `runs/notebook`。再次运行本笔记本时，会直接用上这份结果，不必重新训练。

# %%
settings = [f"data.corpus={shakespeare if is_play else 'python-stdlib'}", "tokenizer.kind=byte"]
settings += (
    [f"train.max_steps={steps}", "eval.max_tokens=1_000"] if steps else ["train.max_minutes=5", "train.log_interval=100"]
)
recipe = txl.load_recipe("shakespeare-small", settings)
outcome = txl.train(recipe, out="runs/notebook", resume=True)

# %% [markdown]
# 曲线画的是损失（loss），单位是**奈特/词元**（nats per token）：取模型给真正的下一个字节的概率，求自然对数，再取负。数值越低越好。横轴是读过的训练词元数（以百万计）；曲线是训练（training）损失，标记是验证（validation）损失，其中一个是拿走记忆（no memory）之后的。

# %%
plt.figure(figsize=(9, 5))
plt.imshow(plt.imread("runs/notebook/loss.png"))
plt.axis("off")
plt.show()

model, tokenizer = txl.load("runs/notebook")
n_parameter = sum(parameter.numel() for parameter in model.parameters())
print(f"{n_parameter:,} parameters, {model.config.n_layer} layers, {model.config.n_head} heads each")
print(f"segments of {recipe.train.tgt_len} bytes, a memory of {model.mem_len} for each layer")
print(f"{outcome.tokens:,} bytes read in {outcome.seconds:.0f} seconds")

# %% [markdown]
# ## 生成文本
#
# 模型每次算出下一个字节的概率分布，再从中采样。温度（temperature）低于一时，它更偏向可能性大的字节。它没有见过词典：关于单词、人名和排版的一切，都是从字节里学来的。

# %%
prompt = "ROMEO:\n" if is_play else "def read(self, "
written = txl.generate(model, tokenizer.encode(prompt), txl.Sampling(temperature=0.8), max_new_tokens=400, seed=1)
print(prompt + tokenizer.decode(list(written)))

# %% [markdown]
# ## 拿走记忆
#
# 我们让模型读一段训练时没有见过的文本，读两遍：一遍有记忆，一遍没有。两遍用的是同一个模型、同样的片段划分，每个字节都恰好预测一次。唯一的区别是：第二遍看不到当前片段之前的内容。下面依次打印有记忆、无记忆时的平均损失，以及两者之差，即记忆的价值。

# %%
text = txl.prepare(recipe.data, tokenizer, progress=False).splits["valid"].ids[: 1_100 if steps else 40_000]
tgt_len = recipe.train.tgt_len


def nats(mem_len, tgt_len=tgt_len, clamp_len=None):
    score = txl.evaluate(model, text, tgt_len=tgt_len, mem_len=mem_len, clamp_len=clamp_len, per_token=True)
    return np.asarray(score.token_nats)


with_memory, without = nats(model.mem_len), nats(0)
print(f"with memory     {with_memory.mean():.4f} nats per byte")
print(f"without memory  {without.mean():.4f} nats per byte")
print(f"memory is worth {without.mean() - with_memory.mean():.4f} nats per byte")

# %% [markdown]
# ## 上下文碎片化
#
# 损失高在哪里？下图按字节在片段中的位置统计。没有记忆时，片段里的第一次预测只能依据一个字节，第二次依据两个字节，依此类推。每到一个新片段，模型都得重新弄清是谁在说话、正读到哪个单词的中间。论文把这种现象称为**上下文碎片化**（context fragmentation）。有了记忆，各个位置就没有差别了。横轴是进入片段后的字节数，纵轴是每字节的奈特数；without memory 是无记忆，with memory 是有记忆，后面几张图也这样标注。

# %%
place = np.arange(len(without)) % tgt_len  # bytes of the segment before the one that is read

fig, axis = plt.subplots(figsize=(9, 4))
for label, curve in (("without memory", without), ("with memory", with_memory)):
    axis.plot(1 + np.arange(tgt_len), np.bincount(place, curve) / np.bincount(place), label=label)
axis.set(xlabel="bytes since the segment border", ylabel="nats per byte", ylim=0)
axis.legend(frameon=False)
plt.show()

early = place < tgt_len // 8
share = (without - with_memory)[early].sum() / (without - with_memory).sum()
print(f"the first {tgt_len // 8} bytes of a segment have {share:.0%} of what memory gains")

# %% [markdown]
# 再逐个字母地看。这里选的是记忆帮助最大的那个片段边界（红线，segment border）。两行是对同一段文字的两次阅读；颜色越深，这个字节的惊异值（surprisal）越高。符号 ␣ 代表空格，¶ 代表换行。

# %%
gain = (without - with_memory)[: len(without) // tgt_len * tgt_len].reshape(-1, tgt_len)[:, :16].sum(1)
border = int(gain[1:].argmax() + 1) * tgt_len
shown = slice(border - 24, border + 24)
letters = [chr(c) if 32 < c < 127 else "␣" if c == 32 else "¶" if c == 10 else "·" for c in text[1:][shown]]

fig, axis = plt.subplots(figsize=(13, 1.8))
axis.imshow(np.stack([without[shown], with_memory[shown]]), cmap="Blues", vmin=0, vmax=8, aspect="auto")
for x, letter in enumerate(letters):
    for y, row in enumerate((without, with_memory)):
        axis.text(x, y, letter, ha="center", va="center", color="white" if row[shown][x] > 4 else "black")
axis.axvline(23.5, color="tab:red")
axis.set_yticks([0, 1], ["without memory", "with memory"])
axis.set_xticks([23.5], ["segment border"])
plt.show()

# %% [markdown]
# 片段越长，边界越少，损失也就越小。但长度每翻一倍，每一步的注意力计算就更贵，而且边界终究还在。有了记忆，片段长度几乎不再重要。横轴是片段长度，以字节计。

# %%
lengths = [16, 32, 64, 128]

fig, axis = plt.subplots(figsize=(9, 4))
axis.plot(lengths, [nats(0, length).mean() for length in lengths], "o-", label="without memory")
axis.plot(lengths, [nats(model.mem_len, length).mean() for length in lengths], "o-", label="with memory")
axis.set_xscale("log", base=2)
axis.set_xticks(lengths, map(str, lengths))
axis.set(xlabel="bytes per segment", ylabel="nats per byte")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 拉长记忆
#
# 这个模型使用**相对位置编码**（relative positional encoding）：注意力头知道一个字节在多远之前，而不是它在全文中的绝对位置。所以不必改动任何权重，就能让模型换用另一种长度的记忆。横轴是记忆的长度，虚线标出的是训练时的长度。
#
# 不过有一个问题。记忆比训练时长出许多，就会出现模型从未遇到过的距离，该怎么用，它没有学过。`clamp_len` 把更远的内容都当作恰好处在已知的最远距离上，从而减轻损害（图中另一条线不作限制，distances as they are）。

# %%
mem_lens = [0, 16, 32, 64, 128, 256, 512]
farthest = model.mem_len + tgt_len - 1  # from the last byte of a segment to the first one in memory, in training
plain = [nats(mem_len).mean() for mem_len in mem_lens]
clamped = [nats(mem_len, clamp_len=farthest if mem_len else None).mean() for mem_len in mem_lens]

fig, axis = plt.subplots(figsize=(9, 4))
axis.plot(plain, "o-", label="distances as they are")
axis.plot(clamped, "o-", label=f"clamp_len={farthest}")
axis.axvline(mem_lens.index(model.mem_len), color="gray", linestyle="--")
axis.set_xticks(range(len(mem_lens)), map(str, mem_lens))
axis.set(xlabel="positions of memory", ylabel="nats per byte")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# 曲线降到哪里就不再下降？再往前的内容，这个模型就用不上了。它很小，只学了几分钟。论文中的模型更大，训练也更久，它们能从数倍于片段长度的记忆中获益。

# %% [markdown]
# ## 注意力头在看哪里
#
# `attention_weights` 读入一个片段，返回每个头对记忆和片段中每个位置的注意力权重。我们对许多片段取平均。下面每行是一层，各个百分比是该层每个头放在记忆上的注意力。

# %%
M = 2 * model.mem_len
view = model.with_context(mem_len=M)
mems, total = view.init_mems(1), torch.zeros(())
for at in range(0, len(text) // 2 - tgt_len, tgt_len):
    ids = torch.as_tensor(text[at : at + tgt_len].astype(int))[None]
    weights, mems = view.attention_weights(ids, mems=mems)
    if at >= M:  # the memory is full
        total = total + torch.stack(weights)[:, 0]
attention = (total / total[0, 0, 0].sum()).numpy()  # layers, heads, bytes of the segment, bytes of memory and segment
for layer, heads in enumerate(attention[..., :M].sum(-1).mean(-1), start=1):
    print(f"layer {layer}: of each head's attention goes to memory", *(f"{share:.0%}" for share in heads))

# %% [markdown]
# 再按距离来看。每张小图是一层，每条线是一个头。曲线表示注意力有多大比例落在最近的若干字节之内，其中第一个就是该字节自身。一开始就陡升的曲线，说明这个头只盯着最近的几个字母；很晚才升起来的，说明它在从远处收集信息。虚线右侧的内容，只有借助记忆，片段中的每个字节才都能看到。横轴是最近的字节数（含自身），纵轴是注意力的占比。

# %%
distance = np.arange(M, M + tgt_len)[:, None] - np.arange(M + tgt_len)  # from a byte back to what it attends to

fig, axes = plt.subplots(1, len(attention), figsize=(13, 3.5), sharey=True)
for layer, (axis, heads) in enumerate(zip(axes, attention, strict=True), start=1):
    for head in heads:
        by_distance = np.bincount(distance.clip(0).ravel(), head.ravel())
        axis.semilogx(1 + np.arange(M), by_distance.cumsum()[:M] / by_distance.sum())
    axis.axvline(tgt_len, color="gray", linestyle="--")
    axis.set(title=f"layer {layer}", xlabel="last bytes, itself included", ylim=(0, 1.02))
axes[0].set_ylabel("share of attention")
plt.show()

# %% [markdown]
# ## 保存会话，接着读
#
# 解码器 `Decoder` 替你保管记忆。无论读多少文本，占用的空间都不变。读过的内容构成一个**会话**（session），可以存成一个小文件；换一个进程载入它，就能接着读下去，结果逐位相同。

# %%
decoder = txl.Decoder(model)
for piece in np.array_split(text[:1_000], 4):
    decoder.feed([piece.tolist()])
    print(f"{len(piece):,} bytes more, the decoder holds {decoder.n_bytes:,} bytes")
decoder.save("runs/notebook.session")

later = txl.Decoder(model)
later.load("runs/notebook.session")
same = torch.equal(later.scores.full(), decoder.scores.full())
print(f"the file has {Path('runs/notebook.session').stat().st_size:,} bytes; the same scores to the last bit: {same}")

# %% [markdown]
# ## 回退
#
# 如果文本换一种方式写下去，会怎样？先读一种续文，退回来，再读另一种。这里的两种续文，一种是原文（as it is），一种是倒过来的原文（backwards）。退回是精确的：最后一行的结果与第一行完全相同。

# %%
true = text[1_000:1_040].tolist()
for name, ids in (("as it is", true), ("backwards", true[::-1]), ("as it is", true)):
    here = later.take(0)
    (surprise,) = later.score([ids])
    print(f"{name}: {surprise.mean():.4f} nats per byte   {tokenizer.decode(ids)!r}")
    later.put(0, here)

# %% [markdown]
# `take` 取出的状态可以一直留着，用 `put` 放回去，就能从同一处读出许多种续文。如果只想退回几个词元，还有更省事的办法：`rewind`，它只管忘掉最近读过的内容。

# %%
before = later.feed([true])
print(f"it can go back by {later.n_rewindable(0)} bytes")
later.rewind(0, 10)
again = later.feed([true[-10:]])
print(f"largest difference of the scores after going back and reading again: {(again - before).abs().max():.1e}")

# %% [markdown]
# ## 接下来
#
# - 换成你自己的文本：在命令行用 `txl train my.txt`，在这里用 `txl.train(corpus="my.txt")`。
# - `txl explain runs/notebook my.txt` 会生成一个网页，按记忆带来的收益给每个字节着色。
# - 想知道模型内部怎样运作，请读[逐行读懂 Transformer-XL](../docs/annotated/zh.md)；术语见[术语表](../docs/glossary.md)。
# - 关于文本生成、会话和各种记忆，详见英文文档 [docs/generating.md](../docs/generating.md)、[Decoder](../docs/generating.md#decoder) 和 [docs/models.md](../docs/models.md#memory)；代码结构见 [docs/design.md](../docs/design.md)。
