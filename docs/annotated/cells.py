"""What the annotated model runs beside its text: each cell is shown with what it printed, in both languages."""

# %% text
import torch
from torch import Tensor

torch.manual_seed(1)
stream = torch.randint(8, (16, 1206))  # 16 texts of 8 letters
for t in range(6, 1206):  # a letter repeats the one six before it, nine times of ten
    repeats = torch.rand(16) < 0.9
    stream[repeats, t] = stream[repeats, t - 6]


def spelled(ids: Tensor) -> str:
    return " ".join("abcdefgh"[i] for i in ids.tolist())


print("  |  ".join(spelled(stream[0, t : t + 4]) for t in range(0, 24, 4)))

# %% train
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model_config import TransformerXLConfig

T, M = 4, 8  # tgt_len: letters per segment; mem_len: positions of memory
config = TransformerXLConfig(vocab_size=8, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, mem_len=M)
model = TransformerXL(config)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
mems = None
for step in range(250):
    ids, labels = stream[:, step * T : step * T + T], stream[:, step * T + 1 : step * T + T + 1]
    out = model(ids, mems=mems, labels=labels)
    mems = out.mems  # this segment's states are the next one's memory
    optimizer.zero_grad()
    out.nll.mean().backward()
    optimizer.step()
    if step % 50 == 0 or step == 249:
        print(f"step {step:3}: {out.nll.mean().item():.2f} nats per letter")

# %% worth
model.eval()


@torch.no_grad()
def loss(reader: TransformerXL, n: int = 40) -> float:
    """Read the last segments, which training did not see."""
    nats, mems = [], None
    for t in range(1200 - n * T, 1200, T):
        out = reader(stream[:, t : t + T], mems=mems, labels=stream[:, t + 1 : t + T + 1])
        nats.append(out.nll.mean())
        mems = out.mems
    return torch.stack(nats).mean().item()


with_memory, without_memory = loss(model), loss(model.with_context(mem_len=0))
print(f"with memory {with_memory:.2f}, without {without_memory:.2f} nats per letter; a blind guess costs {torch.tensor(8.0).log():.2f}")

# %% memory
mems = model.init_mems(1, length=0)
for n in range(3):
    mems = model(stream[:1, n * T : n * T + T], mems=mems).mems
    print(f"after segment {n + 1}: {len(mems.hidden)} layers, each {tuple(mems.hidden[0].shape)}, valid {mems.n_valid.tolist()}")

alphabet = model.embedding(torch.arange(8))  # what enters the first layer; the nearest letter names each state
remembered_letters = torch.cdist(mems.hidden[0][0], alphabet).argmin(dim=-1)
print("read:               ", spelled(stream[0, : 3 * T]))
print("layer 1 remembers:  ", " " * (2 * T - 1), spelled(remembered_letters))

# %% gradient
segment, following = stream[:1, :T], stream[:1, T : 2 * T]
for keep_graph in (False, True):
    mems = model(segment, keep_graph=keep_graph).mems
    print(f"keep_graph={keep_graph}: the memory passes a gradient on: {mems.hidden[1].requires_grad}")

mems = model(segment).mems
model.zero_grad()
model(following, mems=mems, labels=stream[:1, T + 1 : 2 * T + 1]).nll.sum().backward()
w_q, w_k, w_v = model.layers[0].attention.qkv_net.weight.grad.chunk(3)
print(f"gradient of W_q {w_q.norm():.2f}, W_k {w_k.norm():.2f}, W_v {w_v.norm():.2f}")

# %% reach
@torch.no_grad()
def last_scores(ids: Tensor) -> Tensor:
    mems = None
    for part in ids.split(T, dim=1):
        out = model(part, mems=mems)
        mems = out.mems
    return out.logits[0, -1]


text = stream[:1, : 8 * T]
scores, felt = last_scores(text), ""
for t in range(8 * T):
    changed = text.clone()
    changed[0, t] = (text[0, t] + 1) % 8
    felt += "#" if (last_scores(changed) != scores).any() else "."
print(" ".join(felt[t : t + T] for t in range(0, 8 * T, T)))
print(f"the last query feels {felt.count('#')} letters: {config.n_layer} layers x {M} of memory + {T} of the segment")

# %% weights
states, _ = model.hidden_states(segment_ids := stream[:1, 1000:1004], mems=(before := model(stream[:1, 992:1000]).mems))
block = model.layers[0].attention
positions = block.positions(model, M + T, backend="auto")[0]
first = torch.zeros(1, T, dtype=torch.int64)  # every query sees all of the memory
attended = block.weights(states[0], mem_BMD=before.hidden[0], first_BT=first, **positions).detach()
print("weights (B, N, T, S):", tuple(attended.shape))
for query, row in enumerate(attended[0, 0]):
    print(f"query {M + query:2}:", " ".join(f"{x:.2f}".replace("0.00", "   ." if i <= M + query else "    ") for i, x in enumerate(row.tolist())))

# %% terms
q, k, _ = block.project(states[0], before.hidden[0], None)
r = block._position_keys(positions["r_SD"])
u, v = positions["r_w_bias"], positions["r_r_bias"]
head, at = 0, T - 1  # the segment's last query, S-1 .. 0 before it
scale = config.d_head**-0.5
terms = {
    "(a) q.k": torch.einsum("h,sh->s", q[0, at, head], k[0, :, head]),
    "(b) q.r": torch.einsum("h,sh->s", q[0, at, head], r[:, head]),
    "(c) u.k": torch.einsum("h,sh->s", u[head], k[0, :, head]),
    "(d) v.r": torch.einsum("h,sh->s", v[head], r[:, head]),
}
print("distance", " ".join(f"{d:5}" for d in range(M + T - 1, -1, -1)))
for name, term in [*terms.items(), ("sum", sum(terms.values()))]:
    print(f"{name:8}", " ".join(f"{x:5.1f}" for x in (term * scale).tolist()))

# %% sinusoids
from transformer_xl.model.attention.equation import first_keys, hidden_keys, key_distances, rel_shift, sinusoids

R = sinusoids(torch.arange(7), 32)
print("R of the distances 0 to 6:", tuple(R.shape))
print("R_0.R_d:", " ".join(f"{x:.1f}" for x in (R @ R[0]).tolist()))
print("R_2.R_d:", " ".join(f"{x:.1f}" for x in (R @ R[2]).tolist()))

# %% shift
T3, M2 = 3, 2
by_distance = key_distances(M2 + T3, clamp_len=None).expand(1, 1, T3, -1)
print("before: column j is distance S-1-j")
print(by_distance[0, 0])
print("after: column s is key s")
print(rel_shift(by_distance)[0, 0])

# %% mask
def seen(first_BT: Tensor, n_key: int) -> None:
    for row in hidden_keys(first_BT, n_key)[0]:
        print("  ", " ".join(".#"[not hidden] for hidden in row.tolist()))


sizes = {"tgt_len": 4, "memory_length": 3}
full, begins = torch.tensor([3]), torch.tensor([[False, False, True, False]])
print("memory of 3, segment of 4")
seen(first_keys(None, full, None, window=None, **sizes)[0], 7)
print("only 1 position of the memory is real")
seen(first_keys(None, torch.tensor([1]), None, window=None, **sizes)[0], 7)
print("a document begins at the third token")
first_BT, n_own = first_keys(begins, full, None, window=None, **sizes)
seen(first_BT, 7)
print("same_length: every query sees 3 keys")
seen(first_keys(None, full, None, window=3, **sizes)[0], 7)
