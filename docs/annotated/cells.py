"""What the annotated model runs beside its text: each cell is shown with what it printed, in all languages."""

# %% text
import torch
from torch import Tensor

torch.manual_seed(1)
stream = torch.randint(8, (16, 1206))  # 16 texts of 8 letters
for t in range(6, 1206):  # nine times of ten, a letter repeats the one six before
    repeats = torch.rand(16) < 0.9
    stream[repeats, t] = stream[repeats, t - 6]


def spelled(ids: Tensor) -> str:
    return " ".join("abcdefgh"[i] for i in ids.tolist())


print(" | ".join(spelled(part) for part in stream[0, :24].split(4)))

# %% train
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.model.transformer_xl import TransformerXL

T, M = 4, 8  # letters per segment (tgt_len), positions of memory (mem_len)
sizes = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64}
config = TransformerXLConfig(vocab_size=8, mem_len=M, **sizes)
model = TransformerXL(config)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
mems = None
for step in range(250):
    t = step * T
    ids, labels = stream[:, t : t + T], stream[:, t + 1 : t + T + 1]
    out = model(ids, mems=mems, labels=labels)
    mems = out.mems  # what this segment leaves behind, the next one reads
    loss = out.nll.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3}: {loss.item():.2f} nats per letter")


# %% worth
@torch.no_grad()
def mean_loss(reader: TransformerXL) -> float:
    """Read what training has not seen."""
    nats, mems = [], None
    for t in range(1040, 1200, T):
        ids, labels = stream[:, t : t + T], stream[:, t + 1 : t + T + 1]
        out = reader(ids, mems=mems, labels=labels)
        nats.append(out.nll.mean())
        mems = out.mems
    return torch.stack(nats).mean().item()


model.eval()
with_memory = mean_loss(model)
without_memory = mean_loss(model.with_context(mem_len=0))
guess = torch.tensor(8.0).log()
print(f"with memory    {with_memory:.2f} nats per letter")
print(f"without memory {without_memory:.2f}")
print(f"a blind guess  {guess:.2f}")

# %% memory
mems = None
for n, segment in enumerate(stream[:1, : 3 * T].split(T, dim=1), start=1):
    mems = model(segment, mems=mems).mems
    shapes = [tuple(h.shape) for h in mems.hidden]
    print(f"after segment {n}: {shapes}, valid: {mems.n_valid.item()}")

alphabet = model.embedding(torch.arange(8))
letters = torch.cdist(mems.hidden[0][0], alphabet).argmin(dim=-1)
print("read:             ", spelled(stream[0, : 3 * T]))
print("layer 1 remembers:", "  " * T + spelled(letters))

# %% gradient
first, second = stream[:1, :T], stream[:1, T : 2 * T]
for keep_graph in (False, True):
    state = model(first, keep_graph=keep_graph).mems.hidden[1]
    print(f"keep_graph={keep_graph}: passes a gradient on: {state.requires_grad}")

attention, keys = model.layers[0].attention, []
project = attention.project


def watched(*states: Tensor | None) -> tuple[Tensor, ...]:
    q, k, v = project(*states)
    k.retain_grad()
    keys.append(k)
    return q, k, v


labels, mems = stream[:1, T + 1 : 2 * T + 1], model(first).mems
attention.project = watched
model(second, mems=mems, labels=labels).nll.sum().backward()
del attention.project
share = keys[0].grad[0].flatten(1).norm(dim=1)
share = 100 * share / share.sum()
print("gradient through each key, %:", " ".join(f"{x:.0f}" for x in share))


# %% reach
import copy

exact = copy.deepcopy(model).double()  # so that no change is rounded away


@torch.no_grad()
def last_scores(reader: TransformerXL, ids: Tensor) -> Tensor:
    mems = None
    for segment in ids.split(T, dim=1):
        out = reader(segment, mems=mems)
        mems = out.mems
    return out.logits[0, -1]


def felt_by_the_last(reader: TransformerXL, ids: Tensor) -> str:
    """Change each letter alone; # where the scores after the last one move."""
    before, felt = last_scores(reader, ids), ""
    for t in range(ids.shape[1]):
        other = ids.clone()
        other[0, t] = (ids[0, t] + 1) % 8
        felt += ".#"[(last_scores(reader, other) != before).any()]
    return felt


readers = {
    "M = 8": exact,
    "M = 6": exact.with_context(mem_len=6),
    "M = 8, same_length": exact.with_context(same_length=True),
}
felt = {name: felt_by_the_last(reader, stream[:1, : 7 * T]) for name, reader in readers.items()}
for name, marks in felt.items():
    print(f"{name:18}", *(marks[t : t + T] for t in range(0, 7 * T, T)), marks.count("#"))

# %% speed
D, d_inner = 512, 2048  # of the paper's 12-layer model of enwik8
weights = 4 * D * D + 2 * D * d_inner  # products of one position with weights, in a layer
print("keys   plain, millions   with kept keys   ratio   ratio / keys")
for n in 800, 1800, 2800, 3800:
    plain = n * (weights + 2 * D * n / 2)  # n positions; on average, each sees half of them
    kept = weights + 2 * D * n + D * min(n, 821)  # one position, n keys and their distances
    print(f"{n:4}{plain / 1e6:18,.0f}{kept / 1e6:17.2f}{plain / kept:8,.0f}{plain / kept / n:15.2f}")


# %% weights
from transformer_xl.kernels.equation import relative_attention
from transformer_xl.model.mask import Mask


def row(values: Tensor, form: str = "3") -> str:
    return " ".join(format(x, form) for x in values.tolist())


before = model(stream[:1, 992:1000]).mems
states, _ = model.hidden_states(stream[:1, 1000:1004], mems=before)
block = model.layers[0].attention
positions = model.positions(M + T)[0]  # u, v and R
everything = Mask(first=torch.zeros(1, T, dtype=torch.int64), n_own=torch.tensor([M + T]))
context = {"mem_BMD": before.hidden[0], "mask": everything, "positions": positions}
attended = block.weights(states[0], **context)
percent = (100 * attended[0, 0]).round().int()  # of the first text, head 0
print("weights:", tuple(attended.shape))
print("key       ", row(torch.arange(M + T)))
for i in range(T):
    print(f"query {M + i:2}:", row(percent[i, : M + i + 1]))

# %% terms
q, k, v = block.project(states[0], before.hidden[0], None)
q_i, k_j = q[0, -1, 0], k[0, :, 0]  # the segment's last query, head 0
r = block.complete(positions).r[:, 0]
bias_u, bias_v = positions.u[0], positions.v[0]
terms = {
    "(a) q k": k_j @ q_i,
    "(b) q r": r @ q_i,
    "(c) u k": k_j @ bias_u,
    "(d) v r": r @ bias_v,
}
terms["sum    "] = k_j @ (q_i + bias_u) + r @ (q_i + bias_v)
print("distance", row(torch.arange(M + T - 1, -1, -1)))
for name, term in terms.items():
    print(name, "", row((term / config.d_head**0.5).round().int()))

# %% sinusoids
from transformer_xl.kernels.equation import sinusoids

R = sinusoids(torch.arange(9), 32)
print("distance  ", row(torch.arange(9)))
print("R_0 . R_d:", row((R @ R[0]).round().int()))
print("R_4 . R_d:", row((R @ R[4]).round().int()))

# %% shift
from transformer_xl.kernels.equation import key_distances, rel_shift

distances = key_distances(5, clamp_len=None)  # T = 3, M = 2
by_distance = distances.expand(1, 1, 3, 5)
print("before, column j is distance 4 - j:")
print(by_distance[0, 0])
print("after, column s is key s:")
print(rel_shift(by_distance)[0, 0])

# %% mask
from transformer_xl.kernels.equation import hidden_keys


def show(title: str, n_valid: int = 3, starts=None, window=None) -> None:
    lengths = {"tgt_len": 4, "memory_length": 3, "window": window}
    mask = Mask.of(starts, torch.tensor([n_valid]), None, **lengths)
    print(title)
    for hidden in hidden_keys(mask.first, 7)[0].tolist():
        print("  ", " ".join("#."[is_hidden] for is_hidden in hidden))


show("3 positions of memory, 4 of the segment:")
show("only the last position of memory is valid:", n_valid=1)
begins = torch.tensor([[False, False, True, False]])
show("a document begins at the third token:", starts=begins)
show("same_length, 3 keys for each:", window=3)

# %% shapes
for name, x in {"q": q, "k": k, "v": v, "R": positions.r}.items():
    print(name, tuple(x.shape))
print("values gathered", tuple(relative_attention(q, k, v, block.complete(positions), first_BT=everything.first).shape))
print("block's output", tuple(block(states[0], **context).shape))

# %% norms
x = torch.randn(1, 1, 32) * 5 + 3
pre_norm = TransformerXL(config.model_copy(update={"pre_lnorm": True})).eval()
outputs = {
    "input": x,
    "output, post-norm": model.layers[0].feed_forward(x),
    "output, pre-norm": pre_norm.layers[0].feed_forward(x),
}
for name, y in outputs.items():
    print(f"{name:18} mean {y.mean():5.2f}, deviation {y.std():.2f}")

# %% parameters
for name, parameter in model.named_parameters():
    if "layers.1" not in name:  # which has what layers.0 has
        print(f"{name:39}", tuple(parameter.shape))
print(f"{sum(p.numel() for p in model.parameters()):,} numbers")

# %% trace
ids, labels = stream[:3, :T], stream[:3, 1 : T + 1]
inputs, new_mems = model.hidden_states(ids)
print("ids   ", tuple(ids.shape))
for n, h in enumerate(inputs[:-1], start=1):
    print(f"layer {n} reads", tuple(h.shape))
print("the softmax reads", tuple(inputs[-1].shape))
print("scores", tuple(model(ids).logits.shape))
print("nats  ", tuple(model(ids, labels=labels).nll.shape))
same = torch.equal(new_mems.hidden[1], inputs[1])
print("layer 2 remembers what it read:", same)

# %% shaw
learned = config.model_copy(update={"attention": "shaw", "max_klen": M + T})
for name, table in TransformerXL(learned).learned_positions.items():
    print(f"shaw:           {name} {tuple(table.shape)}")
for name, table in model.learned_positions.items():
    print(f"transformer_xl: {name} {tuple(table.shape)}")

# %% adaptive
from transformer_xl.model.adaptive import Clusters

# the words of WikiText-103, with the paper's cutoffs
V, D, cutoffs = 267_735, 1024, (20_000, 40_000, 200_000)
total = 0
clusters = Clusters(V, cutoffs, div_val=4, d_embed=D, d_model=D)
for size, width in zip(clusters.sizes, clusters.widths, strict=True):
    total += size * width + width * D  # vectors and projection
    print(f"{size:7,} words of width {width:4}")
print(f"{total:,} numbers instead of {V * D:,}")

small = TransformerXL(config.model_copy(update={"cutoffs": (3, 5)})).eval()
p = small(stream[:1, :1]).logits[0, 0].exp()
print("8 letters in clusters of 3, 2 and 3:")
print(row(p, ".2f"), f"sum {p.sum():.2f}")

# %% streams
from transformer_xl.model.attention.two_streams import hidden_by_rank

words, targets = ["New", "York", "is", "big"], torch.tensor([[3, 1]])
rank = torch.tensor([[-1, 1, -1, 0]])  # all see New and is; then big, then York
sees = torch.tensor([[0, 1, 0, 0]])
both = torch.cat([sees, sees.gather(1, targets)], dim=1)
names = [f"h {word}" for word in words] + ["g big", "g York"]
print("        " + "".join(f"{word:5}" for word in words))
for name, hidden in zip(names, hidden_by_rank(rank, both, n_content=4)[0].tolist(), strict=True):
    print(f"{name:7}", "".join(f"{'#.'[is_hidden]:5}" for is_hidden in hidden))
