"""Models with heads: documents of any length, rows of any batch, gradients over segments, saving and loading."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import TINY, assert_close, random_weights, tiny_model
from transformer_xl.batch import Batch, Rows, TaskRows
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config.model import (
    HeadConfig,
    LstmConfig,
    ModelConfig,
    TransformerXLConfig,
    VanillaConfig,
    XLNetConfig,
    model_config,
)
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.base import LanguageModel, SequenceModel
from transformer_xl.model.build import make_model
from transformer_xl.model.call import Execution, ModelOutput
from transformer_xl.model.heads import SpanScores
from transformer_xl.model.memory import Mems
from transformer_xl.model.task_model import TaskModel
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.tokenizers.kinds import ByteTokenizer

T = 4
IDS = torch.zeros(2, 3, 4, dtype=torch.int64)
KINDS: tuple[str, ...] = get_args(HeadConfig.model_fields["kind"].annotation)
SIZES: dict[str, Any] = {**TINY, "d_model": 12}
LSTM = LstmConfig(vocab_size=13, n_layer=2, d_model=12, d_hidden=7, dropout=0.0)
BACKBONES: dict[str, ModelConfig] = {
    "xlnet": XLNetConfig(**SIZES, dropatt=0.0),
    "xlnet that trained after zeros": XLNetConfig(**SIZES, dropatt=0.0, zero_first_memory=True),
    "xlnet with a long memory": XLNetConfig(**{**SIZES, "mem_len": 20}, dropatt=0.0),
    "transformer_xl": TransformerXLConfig(**SIZES),
    "after zeros": TransformerXLConfig(**SIZES, zero_first_memory=True),
    "same_length": TransformerXLConfig(**SIZES, same_length=True),
    "shaw": TransformerXLConfig(**SIZES, attention="shaw", max_klen=9),
    "vaswani": TransformerXLConfig(**SIZES, attention="vaswani"),
    "al_rfou": TransformerXLConfig(**SIZES, attention="al_rfou", max_klen=9),
    "lstm": LSTM,
}
LENGTHS = (1, 3, 4, 5, 8, 9, 11, 15)

pytestmark = pytest.mark.usefixtures("double_precision")


def head_config(kind: str = "classification", **changes: Any) -> HeadConfig:
    labels = {"classification": ("a", "b", "c"), "multilabel": ("a", "b"), "tokens": ("a", "b", "c")}.get(kind, ())
    return HeadConfig(**{"kind": kind, "labels": labels, "dropout": 0.0, "tgt_len": T, **changes})


def task_model(config: ModelConfig = BACKBONES["xlnet"], kind: str = "classification", **changes: Any) -> TaskModel:
    model = make_model(config.model_copy(update={"head": head_config(kind, **changes)}))
    assert isinstance(model, TaskModel)
    return random_weights(model.eval())


def together(rows: list[Tensor], length: int | None = None, *, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of several lengths as a batch, padded at the left, and how many places are padding."""
    length = length or max(map(len, rows))
    ids = torch.full((len(rows), length), padding)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = row
    return ids, torch.tensor([length - len(row) for row in rows])


def read(model: SequenceModel, ids: Tensor, mems: Any, segments: Tensor | None = None, **other: Any) -> tuple[Tensor, Any]:
    if isinstance(model, XLNet):
        return model.read(ids, mems=mems, segments=segments, **other)
    assert isinstance(model, LanguageModel)
    return model.read(ids, mems=mems, **other)


def pieces(row: Tensor) -> list[Tensor]:
    """A row in segments, counted from its end."""
    begins = [*range(len(row), 0, -T), 0][::-1]
    return [row[begin:end][None] for begin, end in itertools.pairwise(begins)]


def states_by_hand(
    model: TaskModel,
    row: Tensor,
    segments: Tensor | None = None,
    *,
    cuts: Callable[[int], bool] = lambda n_left: False,
    cuts_states: bool = False,
) -> Tensor:
    """States of one text, from a reading of it without padding, segment by segment.

    Gradients end in the memory (and with `cuts_states` in all states) before a segment after which `cuts` n_left are left.
    """
    mems = model.backbone.init_mems(1, length=0) if isinstance(model.backbone, XLNet) else None
    states, parts = [], pieces(row)
    texts = [torch.zeros_like(part) for part in parts] if segments is None else pieces(segments)
    for i, (piece, text) in enumerate(zip(parts, texts, strict=True)):
        if cuts(len(parts) - i):
            mems = mems.detach() if mems is not None else None
            states = [h.detach() for h in states] if cuts_states else states
        h, mems = read(model.backbone, piece, mems, text, keep_graph=True)
        states.append(h[0])
    return torch.cat(states)


def summary_of(model: TaskModel, h: Tensor) -> Tensor:
    assert model.config.head is not None
    return h[-1:] if model.config.head.summary == "last" else h.mean(0, keepdim=True)


def by_hand(model: TaskModel, row: Tensor, segments: Tensor | None = None) -> Tensor:
    """Scores of one text."""
    return model.head(summary_of(model, states_by_hand(model, row, segments)))[0]


@pytest.mark.parametrize("summary", ["last", "mean"])
@pytest.mark.parametrize("name", BACKBONES)
def test_a_row_gives_what_its_text_alone_gives(name: str, summary: str) -> None:
    """Whatever the batch, the padding and what stands in it; rows begin in different segments, and some have none before."""
    model = task_model(BACKBONES[name], summary=summary)
    rows = [torch.randint(13, (n,)) for n in LENGTHS]
    alone = torch.stack([by_hand(model, row) for row in rows])
    assert len(alone.unique(dim=0)) == len(rows)
    all_of_them = list(range(len(rows)))
    batches = ((all_of_them, None, 0), (all_of_them[::-1], 16, 3), ([0, 5], 19, 7), (all_of_them, 33, 12), ([3], 33, 1))
    for some, length, padding in batches:
        ids, n_pad = together([rows[i] for i in some], length, padding=padding)
        assert_close(f"{some} {length}", model(ids, n_pad=n_pad).logits, alone[some], 1e-12)
    assert_close("no padding", model(rows[-1][None]).logits[0], alone[-1], 1e-12)


def test_texts_of_a_row_are_told_apart_across_segments() -> None:
    """Segments are cut like ids; what is remembered counts as the first text, as in Hugging Face's code."""
    for summary in ("last", "mean"):
        model = task_model(summary=summary)
        rows = [torch.randint(13, (n,)) for n in LENGTHS]
        texts = [(torch.arange(len(row)) * 3 // len(row)) for row in rows]
        ids, n_pad = together(rows, 17)
        segments, _ = together(texts, 17, padding=2)
        expected = torch.stack([by_hand(model, row, text) for row, text in zip(rows, texts, strict=True)])
        found = model(ids, n_pad=n_pad, segments=segments).logits
        assert_close("logits", found, expected, 1e-12)
        assert (found - model(ids, n_pad=n_pad).logits).abs().max() > 1e-3


def test_memory_reaches_what_a_segment_does_not() -> None:
    """The first token matters while memory reaches it, and no longer; and without memory a text is its last segment."""
    row = torch.randint(13, (1, 7))
    other = row.clone()
    other[0, 0] = (row[0, 0] + 1) % 13
    model = task_model()
    assert (model(row).logits - model(other).logits).abs().max() > 1e-4
    short = model.with_context(mem_len=2)
    assert (short.mem_len, short.backbone.mem_len, model.mem_len) == (2, 2, 5)
    assert short.head is model.head
    # of 3 tokens and 4, the second segment sees 2 of the first, whose last states have seen token 0
    assert (short(row).logits - short(other).logits).abs().max() > 1e-4
    forgetful = model.with_context(mem_len=0)
    assert torch.equal(forgetful(row).logits, forgetful(other).logits)
    assert torch.equal(forgetful(row).logits, forgetful(row[:, 3:]).logits)


def learned_gradients(model: TaskModel) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradient is not None for gradient in found.values()), [n for n, g in found.items() if g is None]
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize(("n_segment", "summary"), [(1, "last"), (1, "mean"), (2, "last"), (2, "mean"), (9, "mean")])
@pytest.mark.parametrize("name", ["xlnet", "transformer_xl", "after zeros", "lstm"])
def test_gradients_reach_through_the_last_segments(name: str, n_segment: int, summary: str) -> None:
    """Against a reading by hand, whose memory is cut off where the last segments begin."""
    model = task_model(BACKBONES[name], summary=summary, gradient_segments=n_segment).train()
    row, label = torch.randint(13, (11,)), torch.tensor([1])
    model(row[None], labels=label).nll.sum().backward()
    found = learned_gradients(model)
    model.zero_grad()
    h = states_by_hand(model, row, cuts=lambda n_left: n_left == n_segment, cuts_states=True)
    torch.nn.functional.cross_entropy(model.head(summary_of(model, h)), label).backward()
    expected = learned_gradients(model)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert_close(key, found[key], gradient, 1e-12)


@pytest.mark.parametrize(("name", "weight"), [("xlnet", "v_net.weight"), ("transformer_xl", "v_net.weight"), ("lstm", "l0")])
def test_gradients_through_all_segments_are_those_of_the_loss(name: str, weight: str) -> None:
    """Slopes of the whole calculation, so also of what is remembered."""
    label, row = torch.tensor([1]), torch.randint(13, (1, 11))
    model = task_model(BACKBONES[name], gradient_segments=3)
    model(row, labels=label).nll.sum().backward()
    parameters = dict(model.named_parameters())
    of_layer = next(key for key in parameters if key.startswith("backbone.layers.0.") and key.endswith(weight))
    for key in ("backbone.embedding.weight", of_layer):
        parameter, gradient = parameters[key], parameters[key].grad
        assert gradient is not None
        place = divmod(int(gradient.abs().argmax()), gradient.shape[1])
        losses = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter[place] += step
                losses.append(model(row, labels=label).nll.sum())
                parameter[place] -= step
        assert_close(key, gradient[place], (losses[0] - losses[1]) / 2e-5, 1e-6, least=1e-3)


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_segments_before_those_keep_no_graph(checkpoint_layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = task_model(gradient_segments=2).train()
    seen: list[tuple[bool, bool]] = []
    plain = XLNet.read

    def watched(self: XLNet, ids: Tensor, *, keep_graph: bool = False, **other: Any) -> Any:
        seen.append((torch.is_grad_enabled(), keep_graph))
        return plain(self, ids, keep_graph=keep_graph, **other)

    monkeypatch.setattr(XLNet, "read", watched)
    execution = Execution(checkpoint_layers=checkpoint_layers)
    model(torch.randint(13, (2, 15)), labels=torch.tensor([0, 1]), execution=execution).nll.sum().backward()
    assert seen == [(False, False), (False, False), (True, True), (True, False)]
    with torch.no_grad():
        seen.clear()
        assert not model(torch.randint(13, (2, 9)), labels=torch.tensor([0, 1])).nll.requires_grad
        assert [is_enabled for is_enabled, _ in seen] == [False] * 3


def test_choices_are_read_as_texts_of_their_own() -> None:
    model = task_model(kind="choice")
    rows = [[torch.randint(13, (n,)) for n in lengths] for lengths in ((3, 9, 6), (11, 1, 4))]
    batches = [together(choices, 12) for choices in rows]
    ids, n_pad = (torch.stack(tensors) for tensors in zip(*batches, strict=True))
    expected = torch.stack([torch.cat([by_hand(model, text) for text in choices]) for choices in rows]).detach()
    assert_close("logits", model(ids, n_pad=n_pad).logits, expected, 1e-12)
    out = model(ids, n_pad=n_pad, segments=torch.zeros_like(ids), labels=torch.tensor([2, -100]))
    assert_close("nll", out.nll, torch.tensor([-expected[0].log_softmax(0)[2], 0.0]), 1e-12)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_token_has_the_scores_of_its_segment(name: str) -> None:
    """Of all segments, each read after those before it, whatever the batch and its padding."""
    model = task_model(BACKBONES[name], "tokens")
    rows = [torch.randint(13, (n,)) for n in LENGTHS]
    for length in (15, 18):
        ids, n_pad = together(rows, length, padding=3)
        logits = model(ids, n_pad=n_pad).logits
        assert logits.shape == (len(rows), length, 3)
        for found, row in zip(logits, rows, strict=True):
            assert_close(name, found[length - len(row) :], model.head(states_by_hand(model, row)), 1e-12)


@pytest.mark.parametrize("n_segment", [1, 2])
@pytest.mark.parametrize("name", ["xlnet", "transformer_xl", "lstm"])
def test_gradients_of_tokens_reach_through_groups_of_segments(name: str, n_segment: int) -> None:
    """All segments are learned from; gradients go back through memory within groups, counted from the end."""
    model = task_model(BACKBONES[name], "tokens", gradient_segments=n_segment).train()
    row = torch.randint(13, (14,))
    labels = torch.randint(3, (1, 14))
    labels[0, ::3] = -100
    model(row[None], labels=labels).nll.sum().backward()
    found = learned_gradients(model)
    model.zero_grad()
    h = states_by_hand(model, row, cuts=lambda n_left: n_left % n_segment == 0)
    torch.nn.functional.cross_entropy(model.head(h), labels[0], reduction="sum").backward()
    for key, gradient in learned_gradients(model).items():
        assert_close(key, found[key], gradient, 1e-12)


@pytest.mark.parametrize("kind", ["multilabel", "regression"])
def test_other_labels_reach_the_head(kind: str) -> None:
    model = task_model(kind=kind)
    ids = torch.randint(13, (2, 6))
    labels = {"multilabel": torch.tensor([[0.0, 1.0], [1.0, 1.0]]), "regression": torch.tensor([0.5, -2.0])}[kind]
    scores = model(ids).logits
    assert scores.shape == (2, 2 if kind == "multilabel" else 1)
    assert_close("nll", model(ids, labels=labels).nll, model.head.nll(scores, labels), 0.0)  # pyright: ignore


@pytest.mark.parametrize("name", ["xlnet", "transformer_xl", "lstm"])
def test_places_move_with_the_padding_and_their_scores_stay(name: str) -> None:
    model = task_model(BACKBONES[name], "span", tgt_len=20)
    rows = [torch.randint(13, (n,)) for n in (7, 11, 5)]
    texts = [(torch.arange(len(row)) * 2 // len(row)) for row in rows]
    may = [text == 0 for text in texts]
    spans = [torch.tensor([1, 2, 0]), torch.tensor([0, 4, 0]), torch.tensor([4, 4, 1])]
    for length in (11, 18):
        ids, n_pad = together(rows, length)
        segments, _ = together(texts, length)
        may_answer = together(may, length, padding=1)[0].bool()  # as padding must not be, whatever is said of it
        labels = torch.stack(spans)
        labels[:, :2] += n_pad[:, None]
        places: dict[str, Any] = {"n_pad": n_pad, "segments": segments, "may_answer": may_answer}
        out = model.span_scores(ids, **places, n_start=3, n_end=2)
        nll = model(ids, **places, labels=labels).nll
        for b, row in enumerate(rows):
            own: dict[str, Any] = {"segments": texts[b][None], "may_answer": may[b][None]}
            alone = model.span_scores(row[None], **own, n_start=3, n_end=2)
            shown = alone.start_log_probs[0].isfinite()
            assert torch.equal(out.starts[b][shown] - n_pad[b], alone.starts[0][shown])
            for key in ("start_log_probs", "end_log_probs"):
                found, expected = (getattr(scores, key)[i][shown].clamp(min=-1e9) for scores, i in ((out, b), (alone, 0)))
                assert_close(key, found, expected, 1e-12)
            assert_close("no answer", out.no_answer[b], alone.no_answer[0], 1e-12)
            assert_close("nll", nll[b], model(row[None], **own, labels=spans[b][None]).nll[0], 1e-12)


def test_places_are_what_the_head_says_of_the_states_of_one_segment() -> None:
    model: Any = task_model(kind="span", tgt_len=9)
    row, text, head = torch.randint(13, (1, 9)), torch.tensor([[0] * 5 + [1] * 3 + [2]]), model.head
    h, _ = read(model.backbone, row, None, text)
    found: SpanScores = model.span_scores(row, segments=text, may_answer=text == 0)
    for key, value in vars(head.best(h, text == 0, n_start=5, n_end=5)).items():
        assert torch.equal(getattr(found, key), value), key
    start, end = found.starts[0, 1], found.ends[0, 1, 2]
    of_end = head.end(head.end_norm(head.end_inner(torch.cat([h[0, end], h[0, start]])).tanh()))
    assert_close("score", found.scores[0, 1, 2], (head.start(h[0, start]) + of_end)[0], 1e-6)
    labels = torch.tensor([[0, 3, 0]])
    nll = model(row, segments=text, may_answer=text == 0, labels=labels).nll
    assert_close("nll", nll, head.nll(h, text == 0, labels), 0.0)


def document_by_hand(model: TaskModel, rows: list[Tensor]) -> Tensor:
    """Scores of the rows of a document, (n, C), each read without padding after those before it."""
    mems, scores, h = model.backbone.init_mems(1), [], torch.empty(0)
    for row in rows:
        for piece in pieces(row):
            text = torch.zeros_like(piece) if isinstance(model.backbone, XLNet) else None
            h, mems = read(model.backbone, piece, mems, text)
        scores.append(model.head(h[:, -1])[0])
    return torch.stack(scores)


def batch_of_rows(rows: list[Tensor], begins: list[bool], labels: list[int]) -> Batch:
    ids, n_pad = together(rows)
    starts = torch.zeros_like(ids, dtype=torch.bool)
    for row, begin in enumerate(begins):
        starts[row, n_pad[row]] = begin
    return Batch(
        ids, torch.tensor(labels), Rows(n_pad, document_starts=starts), TaskRows(torch.zeros_like(ids), starts), per_row=True
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_rows_of_documents_are_read_after_those_before_them(name: str) -> None:
    """Lanes have rows of any lengths, and begin and end documents at different steps."""
    model = task_model(BACKBONES[name], in_documents=True)
    sizes = [[2, 9, 1, 3], [5, 1], [4, 3]]
    first, second, third = ([torch.randint(13, (n,)) for n in lengths] for lengths in sizes)
    expected = [document_by_hand(model, document) for document in (first, second, third)]
    lanes = [
        list(zip(rows, scores, strict=True))
        for rows, scores in ((first, expected[0]), (second + third, torch.cat(expected[1:])))
    ]
    begins = [[True, True], [False, False], [False, True], [False, False]]
    after = model.init_mems(2)
    mems = model(torch.randint(13, (2, 7)), mems=after).mems  # of what was there before
    for step, begin in enumerate(begins):
        rows, scores = zip(*(lane[step] for lane in lanes), strict=True)
        batch = batch_of_rows(list(rows), begin, [step % 3, -100])
        out = model.loss(batch, mems=mems)
        nll = -torch.stack(scores).log_softmax(1)[:, step % 3] * torch.tensor([1.0, 0.0])
        assert out.nll is not None
        assert_close(f"{name} {step}", out.nll, nll, 1e-12)
        after = after.reset(torch.tensor(begin))
        again = model(batch.ids, n_pad=batch.rows.n_pad, mems=after)
        assert_close(f"{name} {step} logits", again.logits, torch.stack(scores), 1e-12)
        mems, after = out.mems, again.mems
    model.check_memory(mems, 2)


def test_gradients_reach_no_row_before() -> None:
    """And all of the newest one, whose keys are also those of the rows before."""
    model = task_model(in_documents=True)
    rows = [batch_of_rows([torch.randint(13, (3,))], [i == 0], [1]) for i in range(2)]
    mems = model.loss(rows[0], mems=model.init_mems(1)).mems
    assert not any(tensor.requires_grad for tensor in mems.state_dict().values())
    nll = model.loss(rows[1], mems=mems).nll
    assert nll is not None
    nll.sum().backward()
    gradient = model.backbone.embedding.get_parameter("weight").grad
    assert gradient is not None
    seen = gradient.abs().sum(1).nonzero().flatten().tolist()
    assert seen == rows[1].ids.unique().tolist()


def test_memory_of_another_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="a memory of 3 rows must fit ids of 1 rows"):
        model = task_model(BACKBONES["transformer_xl"], in_documents=True)
        model(IDS[0, :1], mems=model.init_mems(3))


def test_memory_goes_in_and_comes_out_untouched() -> None:
    for config in BACKBONES.values():
        model = task_model(config)
        mems = model.init_mems(2)
        assert isinstance(mems, Mems)
        assert mems.length == (config.mem_len if isinstance(config, LstmConfig) else 0)
        ids = torch.randint(13, (2, 9))
        out = model(ids, mems=mems, labels=torch.tensor([0, 1]))
        assert out.mems is mems
        assert torch.equal(out.nll, model(ids, labels=torch.tensor([0, 1])).nll)
        assert model(ids).mems.batch_size == 2


@pytest.mark.parametrize("name", ["xlnet", "transformer_xl", "lstm", "adaptive", "vanilla"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_batch_uses_all_that_is_learned(name: str, kind: str) -> None:
    """What only predicts tokens is not learned, or processes would wait for its gradients."""
    clusters = {"cutoffs": (5,), "div_val": 2, "tie_weight": False}
    vanilla = VanillaConfig(**{**SIZES, "mem_len": 0}, max_len=8, n_target=2)
    configs = {**BACKBONES, "adaptive": TransformerXLConfig(**SIZES, **clusters), "vanilla": vanilla}
    model = task_model(configs[name], kind, max_len=T).train()
    out: ModelOutput = model.loss(model.smallest_batch(), mems=None)
    assert out.nll is not None
    assert out.nll.shape == ((1, 1) if kind == "tokens" else (1,))
    out.nll.sum().backward()
    learned_gradients(model)
    rest = {name.removeprefix("backbone.") for name, parameter in model.named_parameters() if not parameter.requires_grad}
    own = {"xlnet": {"mask_emb", "softmax.bias"}, "transformer_xl": {"softmax.bias"}, "lstm": {"softmax.bias"}}
    assert rest == own[name] if name in own else all("softmax." in one or "later_targets." in one for one in rest)
    assert len(rest) >= 1


@pytest.mark.parametrize(
    ("name", "kind"), [*(("xlnet", kind) for kind in KINDS), ("transformer_xl", "classification"), ("lstm", "tokens")]
)
def test_a_saved_model_loads_back_with_its_head(name: str, kind: str, tmp_path: Path) -> None:
    config = model_config({**BACKBONES[name].model_dump(), "kind": BACKBONES[name].kind, "vocab_size": 256})
    model = task_model(config, kind)
    model.save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    loaded, _ = load(tmp_path)
    alone = TaskModel.from_pretrained(tmp_path)
    for other in (loaded, alone):
        assert type(other) is TaskModel
        assert other.config == model.config
        assert not other.training
        assert other.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(x, model.state_dict()[key]) for key, x in other.state_dict().items())
        learned = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
        assert {key: parameter.requires_grad for key, parameter in other.named_parameters()} == learned
    batch = model.smallest_batch()
    ours, theirs = model.loss(batch, mems=None).nll, loaded.loss(batch, mems=None).nll
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_a_fine_tuned_directory_is_no_bare_model(tmp_path: Path) -> None:
    task_model().save_pretrained(tmp_path / "tuned")
    tiny_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"^'.*tuned' is fine-tuned \(classification\), and no XLNet alone; txl.load g"):
        XLNet.from_pretrained(tmp_path / "tuned")
    with pytest.raises(CheckpointError, match=r"^'.*bare' has no head; txl finetune gives it one, and txl.load reads it a"):
        TaskModel.from_pretrained(tmp_path / "bare")


def test_a_fine_tuned_model_does_not_open_for_what_needs_a_language_model(tmp_path: Path) -> None:
    task_model(TransformerXLConfig(**{**SIZES, "vocab_size": 256}), "span").save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"is fine-tuned \(span\) and predicts no tokens; txl predict gives w"):
        open_run(tmp_path, device="cpu")
    opened = open_run(tmp_path, device="cpu", any_model=True)
    assert isinstance(opened.any_model, TaskModel)
    with pytest.raises(ConfigError, match="txl predict"):
        opened.check_not_fine_tuned()


def test_what_reads_on_refuses_a_model_that_does_not() -> None:
    tuned, bare = task_model(BACKBONES["transformer_xl"]), make_model(BACKBONES["xlnet"])
    for model, message in (
        (tuned, r"fine-tuned \(classification\) .*; use txl.predict$"),
        (bare, "^a model of kind 'xlnet' does not"),
    ):
        not_one: Any = model
        with pytest.raises(ConfigError, match=message):
            Decoder(not_one)
        with pytest.raises(ConfigError, match=message):
            evaluate(not_one, np.array([1, 2, 3]))


def bare_with_head() -> XLNet:
    return XLNet(XLNetConfig(**SIZES, head=head_config()))


VANILLA = VanillaConfig(**{**SIZES, "mem_len": 0}, max_len=8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TaskModel(BACKBONES["xlnet"]), r"^head \(None\) must say what a TaskModel gives"),
        (bare_with_head, r"^head \(classification\) is no part of XLNet; build a TaskModel of these settings$"),
        (lambda: task_model(VANILLA), r"^a text of more than head.tgt_len \(4\) tokens needs memory, and .* has mem_len 0;"),
        (lambda: task_model(VANILLA, in_documents=True, max_len=4), r"^rows of documents .* has mem_len 0; set mem_len"),
        (lambda: head_config("choice", in_documents=True), r"^in_documents \(True\) does not go with a choice, whose texts"),
        (lambda: head_config("span", in_documents=True), r"^in_documents \(True\) does not go with a span, whose texts stand"),
        (lambda: task_model(VANILLA, tgt_len=9, max_len=9), r"^head.tgt_len \(9\) is longer than what .*; use at most 8$"),
        (lambda: task_model(BACKBONES["shaw"], tgt_len=5), r"^head.tgt_len \(5\) is longer .* 'shaw' .* most 4$"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_when_it_is_built(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_model_without_memory_reads_texts_of_one_segment_or_the_mean() -> None:
    row = torch.randint(13, (11,))
    mean = task_model(VANILLA, summary="mean")
    assert_close("mean", mean(row[None]).logits[0], by_hand(mean, row), 1e-12)
    last = task_model(VANILLA, max_len=T)
    ids, n_pad = together([row[:4], row[:2]])
    expected = torch.stack([by_hand(last, row[:4]), by_hand(last, row[:2])])
    assert_close("last", last(ids, n_pad=n_pad).logits, expected, 1e-12)


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        ("classification", {"ids": IDS}, r"ids \(2, 3, 4\) of a classification must have shape \(batch, length\)"),
        ("choice", {"ids": IDS[0]}, r"ids \(3, 4\) of a choice must have shape \(batch, choices, length\)"),
        ("classification", {"ids": IDS[0, :, :0]}, "none of them 0"),
        ("classification", {"ids": IDS[0], "n_pad": IDS[0, 0]}, r"n_pad \(4,\) must have shape \(3,\)"),
        ("choice", {"ids": IDS, "n_pad": IDS[0, 0]}, r"n_pad \(4,\) must have shape \(2, 3\)"),
        ("regression", {"ids": IDS[0], "segments": IDS[0, :, 1:]}, r"segments \(3, 3\) must have"),
        ("span", {"ids": IDS[0]}, "use span_scores"),
        ("span", {"ids": IDS.view(1, 24), "labels": IDS[:, 0, :3]}, r"no longer than a segment \(head.tgt_len 4\); cut"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(kind: str, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_model(kind=kind)(**call)


def test_only_spans_have_places() -> None:
    with pytest.raises(ValueError, match="a head of kind 'classification' gives no places in a text; only 'span' does"):
        task_model().span_scores(torch.zeros(1, 3, dtype=torch.int64))
