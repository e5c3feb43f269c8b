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
# # What a memory is worth
#
# A language model reads a text in *segments*, because attention over a whole book would cost too much. A plain
# Transformer forgets everything at the border of two segments. [Transformer-XL](https://arxiv.org/abs/1901.02860) keeps
# the hidden states of the segment before as its *memory*, and attends to them while it reads the next one.
#
# In this notebook you train such a model, let it write, take its memory away, stretch it, see where its heads look, and
# carry a session on. All numbers come from the cells, so yours will differ a little from those of others.
#
# The text is Tiny Shakespeare, if the directory that `TXL_DATA` names has `tinyshakespeare/input.txt`. Otherwise it is
# the source code of Python's own library, which is on your machine already.

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
# ## Train
#
# The recipe `shakespeare-small` is the model of the paper in small, with today's optimizer. It reads bytes: each token
# is one character of English. We give it a few minutes.
#
# The run lies in `runs/notebook`. If you start the notebook again, the run is found there and nothing is trained twice.

# %%
settings = [f"data.corpus={shakespeare if is_play else 'python-stdlib'}", "tokenizer.kind=byte"]
settings += (
    [f"train.max_steps={steps}", "eval.max_tokens=1_000"] if steps else ["train.max_minutes=5", "train.log_interval=100"]
)
recipe = txl.load_recipe("shakespeare-small", settings)
outcome = txl.train(recipe, out="runs/notebook", resume=True)

# %% [markdown]
# The curve shows the loss in *nats per token*: minus the natural logarithm of the probability that the model gave to
# the byte that came next. Lower is better.

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
# ## Write
#
# The model draws each byte from the probabilities that it computes. A temperature below one makes it prefer what is
# likely. It has seen no dictionary: whatever it knows of words, names and layout it has from the bytes.

# %%
prompt = "ROMEO:\n" if is_play else "def read(self, "
written = txl.generate(model, tokenizer.encode(prompt), txl.Sampling(temperature=0.8), max_new_tokens=400, seed=1)
print(prompt + tokenizer.decode(list(written)))

# %% [markdown]
# ## Take the memory away
#
# We read a text that the model was not trained on, twice: with the memory, and without. Both times the model is the
# same, the segments are the same, and each byte is predicted exactly once. Only what lies before the segment is gone
# the second time.

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
# ## Fragmentation
#
# Where is the loss? The next picture sorts the bytes by their place in the segment. Without memory, the first
# prediction in a segment rests on a single byte, the second on two, and so on. The model has to find out again and
# again who speaks, and in the middle of which word it is. The paper calls this *context fragmentation*. With memory,
# all places are alike.

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
# The same, letter by letter. This is the border at which memory helps most. Each row is one reading of the same bytes;
# the darker a byte, the more it surprised the model.

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
# Longer segments have fewer borders, so they lose less. But each doubling makes a step of attention more costly, and a
# border remains. A memory makes the length of segments nearly irrelevant.

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
# ## Stretch the memory
#
# Positions in this model are *relative*: a head knows how far back a byte lies, not where it stands in the text. So you
# can give the model another memory than it was trained with, without changing a weight. The dashed line is its length
# in training.
#
# There is a catch. A memory that is much longer brings distances that the model never met while it learned, and it does
# not know what to make of them. `clamp_len` treats all that lies further back as if it lay at the farthest known
# distance, which softens the harm.

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
# Where does the curve stop falling? Further back there is nothing that this model can use. It is small, and it learned
# for minutes. The models of the paper are larger and learned longer, and they gain from memories several times as long
# as their segments.

# %% [markdown]
# ## See where the heads look
#
# `attention_weights` reads a segment and returns how much each head attends to each position of memory and segment. We
# average over many segments.

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
# Now by distance. Each panel is a layer, each line a head. A line says which share of the attention stays within the
# last bytes, of which the byte itself is the first. A line that rises at once is a head that watches the last few
# letters; one that rises late gathers from far back. Right of the dashed line lies what only a memory can show to every
# byte of a segment.

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
# ## Carry a session on
#
# A `Decoder` keeps the memory for you. It reads as much as you like in constant space. What it has read is a *session*:
# a small file, from which another process goes on to the last bit.

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
# ## Rewind
#
# What if the text had gone on in another way? Read one continuation, go back, and read the other. Going back is exact:
# the last line repeats the first.

# %%
true = text[1_000:1_040].tolist()
for name, ids in (("as it is", true), ("backwards", true[::-1]), ("as it is", true)):
    here = later.take(0)
    (surprise,) = later.score([ids])
    print(f"{name}: {surprise.mean():.4f} nats per byte   {tokenizer.decode(ids)!r}")
    later.put(0, here)

# %% [markdown]
# `take` and `put` keep a state as long as you like, and let many continuations begin from it. For a few tokens there is
# a cheaper way, `rewind`, which only forgets:

# %%
before = later.feed([true])
print(f"it can go back by {later.n_rewindable(0)} bytes")
later.rewind(0, 10)
again = later.feed([true[-10:]])
print(f"largest difference of the scores after going back and reading again: {(again - before).abs().max():.1e}")

# %% [markdown]
# ## Where to go on
#
# - Give it your own text: `txl train my.txt`, or `txl.train(corpus="my.txt")` here.
# - `txl explain runs/notebook my.txt` writes a page that colors each byte by what memory gained.
# - [docs/generating.md](../docs/generating.md), [Decoder](../docs/generating.md#decoder) and
#   [docs/models.md](../docs/models.md#memory) say more of writing, sessions and memories; [docs/design.md](../docs/design.md)
#   shows the code.
