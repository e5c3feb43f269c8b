"""Fine-tuned models in transformers: the same numbers as ours, pipelines that give labels, rows laid out as in training."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close, random_weights, tiny_model, tiny_xlnet
from tests.huggingface.conftest import TEXT, edit
from transformer_xl.config.model import HeadConfig
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.conversion.convert import convert
from transformer_xl.data.labels import Example
from transformer_xl.data.layout import Layout, batch_of
from transformer_xl.errors import ConfigError
from transformer_xl.model.heads import TextHead
from transformer_xl.model.task_model import TaskModel
from transformer_xl.tokenizers.kinds import Tokenizer, train_tokenizer

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from transformer_xl.huggingface import XLNetForSequenceClassification, XLNetPretrainedConfig  # noqa: E402

KINDS = ["transformer_xl", "xlnet"]
LABELS = ("no", "yes", "so so")
PASSAGES = ["hello, this is a text", "text of words", "several words of a text of words"]
QUESTIONS = ["several words", "this text is hello", "of"]
TOKENIZERS = {
    "transformer_xl": train_tokenizer(TokenizerConfig(kind="char"), [TEXT]),
    "xlnet": train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=300), [TEXT]),
}


@dataclass(frozen=True)
class Tuned:
    model: TaskModel
    tokenizer: Tokenizer
    path: Path

    def batch(self, examples: list[Example]) -> dict[str, Tensor]:
        """Return rows as ours are laid out."""
        layout = Layout.of(self.model.config, self.tokenizer)
        batch = batch_of([layout.rows(example) for example in examples], torch.zeros(len(examples)))
        return {"ids": batch.ids, "n_pad": batch.n_pad, "segments": batch.texts.segments}


@pytest.fixture
def tune(tmp_path: Path) -> Callable[..., Tuned]:
    def tune(kind: str, task: Any, labels: tuple[str, ...] = (), **changes: Any) -> Tuned:
        tokenizer = TOKENIZERS[kind]
        tiny: Any = tiny_xlnet if kind == "xlnet" else tiny_model
        head = HeadConfig(kind=task, labels=labels, **({"tgt_len": 8} if task != "span" else {}), **changes)
        config = tiny(vocab_size=tokenizer.vocab_size).config.model_copy(update={"head": head})
        model = random_weights(TaskModel(config).eval())
        model.save_pretrained(tmp_path / "tuned")
        tokenizer.save(tmp_path / "tuned" / "tokenizer.json")
        return Tuned(model, tokenizer, tmp_path / "tuned")

    return tune


TASKS = [("classification", LABELS), ("multilabel", LABELS), ("regression", ())]


@pytest.mark.parametrize(("task", "labels"), TASKS, ids=[task for task, _ in TASKS])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_pairs_are_scored_as_ours(tune: Callable[..., Tuned], kind: str, task: str, labels: Any) -> None:
    """Longer than a segment, with padding at either side; the loss is the mean of ours."""
    tuned = tune(kind, task, labels)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(tuned.path), AutoTokenizer.from_pretrained(tuned.path)
    given = {"classification": torch.tensor([2, 0, -100]), "multilabel": torch.eye(3), "regression": torch.tensor([0.5, 1, -2])}
    for side, pairs in itertools.product(("left", "right"), (None, QUESTIONS)):
        tokenizer.padding_side = side
        examples = [Example(text, None if pairs is None else pairs[i]) for i, text in enumerate(PASSAGES)]
        expected = tuned.model(**tuned.batch(examples)).logits
        assert expected is not None and isinstance(tuned.model.head, TextHead)
        out = model(**tokenizer(PASSAGES, pairs, padding=True, return_tensors="pt"), labels=given[task])
        assert_close("logits", out.logits, expected, 2e-6)
        nll = tuned.model.head.nll(expected, given[task])
        assert_close("loss", out.loss, nll.sum() / (2 if task == "classification" else 3), 2e-6)
    assert tokenizer(PASSAGES[0])["attention_mask"] == [1] * len(tokenizer(PASSAGES[0])["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_laid_out_as_they_were_taught(tune: Callable[..., Tuned], kind: str) -> None:
    tuned = tune(kind, "classification", LABELS, max_len=16)
    tokenizer = AutoTokenizer.from_pretrained(tuned.path)
    layout = Layout.of(tuned.model.config, tuned.tokenizer)
    for pair in (None, QUESTIONS[1]):
        (row,) = layout.rows(Example(PASSAGES[2], pair))
        found = tokenizer(PASSAGES[2], pair)
        assert found["input_ids"] == row.ids.tolist()
        assert len(row.ids) == 16  # the text is shortened, what ends it is not
        assert found.get("token_type_ids", [0] * 16) == row.segments.tolist()
    assert ("token_type_ids" in found) == (kind == "xlnet")
    assert len(tokenizer(PASSAGES[2], truncation=True, max_length=7)["input_ids"]) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_places_of_a_pair_are_those_in_its_texts(tune: Callable[..., Tuned], kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tune(kind, "classification", LABELS, max_len=24).path)
    texts = ("  hello,\nthis is ", " several words of text ")
    found = tokenizer(*texts, return_offsets_mapping=True)
    assert found["input_ids"] == tokenizer(*texts)["input_ids"] and len(found["input_ids"]) == 24
    special = tokenizer(*texts, return_special_tokens_mask=True)["special_tokens_mask"]
    shown, which = ["", ""], 0
    for is_special, (start, end) in zip(special, found["offset_mapping"], strict=True):
        which += is_special
        assert not is_special or (start, end) == (0, 0)
        shown[min(which, 1)] += texts[min(which, 1)][start:end]
    assert "".join(shown[0].split()).startswith("hello,th") and "".join(shown[1].split()).startswith("several")
    assert tokenizer.model_max_length == 24
    assert {len(row) for row in tokenizer(["hello", "text"], truncation=True, padding="max_length")["input_ids"]} == {24}


@pytest.mark.parametrize("kind", KINDS)
def test_the_pipeline_gives_labels(tune: Callable[..., Tuned], kind: str) -> None:
    tuned = tune(kind, "classification", LABELS)
    classify = pipeline("text-classification", str(tuned.path))

    def expected(*examples: Example) -> Tensor:
        logits = tuned.model(**tuned.batch(list(examples))).logits
        assert logits is not None
        return logits.detach().softmax(-1)

    for batch_size in (1, 3):
        said = classify(PASSAGES, batch_size=batch_size)
        for found, probabilities in zip(said, expected(*map(Example, PASSAGES)), strict=True):
            assert found["label"] == LABELS[int(probabilities.argmax())]
            assert abs(found["score"] - float(probabilities.max())) < 1e-6
    pair = classify({"text": PASSAGES[0], "text_pair": QUESTIONS[0]}, top_k=None)
    scores = {each["label"]: each["score"] for each in pair}
    (probabilities,) = expected(Example(PASSAGES[0], QUESTIONS[0]))
    assert_close("pair", torch.tensor([scores[label] for label in LABELS]), probabilities, 2e-6)


def test_the_pipeline_gives_numbers(tune: Callable[..., Tuned]) -> None:
    tuned = tune("transformer_xl", "regression")
    value = tuned.model(**tuned.batch([Example(PASSAGES[0])])).logits
    (found,) = pipeline("text-classification", str(tuned.path))(PASSAGES[:1])
    assert value is not None and abs(found["score"] - float(value.detach())) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_scored_as_ours(tune: Callable[..., Tuned], kind: str) -> None:
    tuned = tune(kind, "choice")
    model, tokenizer = AutoModelForMultipleChoice.from_pretrained(tuned.path), AutoTokenizer.from_pretrained(tuned.path)
    expected = tuned.model(**tuned.batch([Example(text, choices=tuple(QUESTIONS)) for text in PASSAGES])).logits
    flat = tokenizer([text for text in PASSAGES for _ in QUESTIONS], QUESTIONS * 3, padding=True, return_tensors="pt")
    out = model(**{name: x.view(3, 3, -1) for name, x in flat.items()}, labels=torch.tensor([1, 0, 2]))
    assert expected is not None
    assert_close("logits", out.logits, expected, 2e-6)
    assert_close("loss", out.loss, torch.nn.functional.cross_entropy(expected, torch.tensor([1, 0, 2])), 2e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_found_where_ours_are(tune: Callable[..., Tuned], kind: str, side: str) -> None:
    tuned = tune(kind, "span")
    model = AutoModelForQuestionAnswering.from_pretrained(tuned.path)
    tokenizer = AutoTokenizer.from_pretrained(tuned.path, padding_side=side)
    rows = tuned.batch([Example(text, pair) for text, pair in zip(PASSAGES, QUESTIONS, strict=True)])
    n_pad, length = rows["n_pad"], rows["ids"].shape[1]
    may_answer = torch.arange(length) - n_pad[:, None] < 5
    expected = tuned.model.span_scores(rows["ids"], n_pad=n_pad, segments=rows["segments"], may_answer=may_answer)
    batch = tokenizer(PASSAGES, QUESTIONS, padding=True, return_tensors="pt")
    shift = n_pad if side == "right" else torch.zeros_like(n_pad)
    p_mask = (torch.arange(length) - (n_pad - shift)[:, None] >= 5).long()
    out = model(**batch, p_mask=p_mask)
    assert_close("starts", out.start_top_log_probs, expected.start_log_probs, 2e-6)
    assert torch.equal(out.start_top_index + shift[:, None], expected.starts)
    assert_close("ends", out.end_top_log_probs.view_as(expected.end_log_probs), expected.end_log_probs, 2e-6)
    assert torch.equal(out.end_top_index.view_as(expected.ends) + shift[:, None, None], expected.ends)
    assert_close("no answer", out.cls_logits, expected.no_answer, 2e-6)
    start, end, none = n_pad + 1, n_pad + 3, torch.tensor([0, 1, 0])
    labels = torch.stack([start, end, none], dim=1)
    given = {"start_positions": start - shift, "end_positions": end - shift, "is_impossible": none}
    loss = model(**batch, p_mask=p_mask, **given).loss
    nll = tuned.model(**rows, may_answer=may_answer, labels=labels).nll
    assert nll is not None
    assert_close("loss", loss, nll.mean(), 2e-6)
    unscored = {"start_positions": (start - shift).clone(), "end_positions": (end - shift).clone(), "is_impossible": none}
    unscored["start_positions"][0] = unscored["end_positions"][0] = -100
    assert_close("loss of some", model(**batch, p_mask=p_mask, **unscored).loss, nll[1:].mean(), 2e-6)
    with pytest.raises(ValueError, match="belong together"):
        model(**batch, start_positions=start)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_scored_as_ours(tune: Callable[..., Tuned], kind: str, side: str) -> None:
    """Of several segments; the loss is the mean of the tokens that are scored, and the pipeline gives each its label."""
    tuned = tune(kind, "tokens", LABELS)
    model = AutoModelForTokenClassification.from_pretrained(tuned.path)
    tokenizer = AutoTokenizer.from_pretrained(tuned.path, padding_side=side)
    rows = tuned.batch([Example(text) for text in PASSAGES])
    expected = tuned.model(**rows).logits
    batch = tokenizer(PASSAGES, padding=True, return_tensors="pt")
    labels = torch.full_like(batch["input_ids"], -100)
    costs = []
    for i, n_pad in enumerate(rows["n_pad"].tolist()):
        begin = n_pad if side == "left" else 0
        n = labels.shape[1] - n_pad
        labels[i, begin : begin + n : 2] = torch.arange(n)[::2] % 3
        costs.append(torch.nn.functional.cross_entropy(expected[i, n_pad::2], torch.arange(n)[::2] % 3, reduction="none"))
    out = model(**batch, labels=labels)
    for i, n_pad in enumerate(rows["n_pad"].tolist()):
        found = out.logits[i, n_pad:] if side == "left" else out.logits[i, : labels.shape[1] - n_pad]
        assert_close("logits", found, expected[i, n_pad:], 2e-6)
    assert_close("loss", out.loss, torch.cat(costs).mean(), 2e-6)
    assert model(**batch, return_dict=False)[0].shape == expected.shape
    said = pipeline("token-classification", str(tuned.path))(PASSAGES[0])
    best = expected[0, rows["n_pad"][0] :].argmax(-1).tolist()
    n_special = 2 if kind == "xlnet" else 1  # at the end, which no word belongs to
    assert [each["entity"] for each in said] == [LABELS[i] for i in best[:-n_special]]


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_both_sides_load(tune: Callable[..., Tuned], kind: str, tmp_path: Path) -> None:
    from transformer_xl.checkpoint.run_directory import load

    tuned = tune(kind, "classification", LABELS)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(tuned.path), AutoTokenizer.from_pretrained(tuned.path)
    with torch.no_grad():
        model.transformer.head.scores.bias.add_(1)
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    native, _ = load(tmp_path / "again")
    assert native.config == tuned.model.config
    batch = tokenizer(PASSAGES, QUESTIONS, padding=True, return_tensors="pt")
    same = AutoTokenizer.from_pretrained(tmp_path / "again")(PASSAGES, QUESTIONS, padding=True, return_tensors="pt")
    assert torch.equal(same["input_ids"], batch["input_ids"])
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    rows = tuned.batch([Example(text, pair) for text, pair in zip(PASSAGES, QUESTIONS, strict=True)])
    for logits in (again(**batch).logits, native(**rows).logits):
        assert_close("logits", logits, model(**batch).logits, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_another_class_than_the_head_needs_is_refused(tune: Callable[..., Tuned], kind: str, tmp_path: Path) -> None:
    autos = {"span": AutoModelForQuestionAnswering, "tokens": AutoModelForTokenClassification}
    for task, labels, wrong in [
        ("span", (), AutoModelForSequenceClassification),
        ("tokens", LABELS, AutoModelForQuestionAnswering),
        *([("span", (), AutoModelForCausalLM)] if kind == "transformer_xl" else []),
    ]:
        with pytest.raises(ConfigError, match=f"is fine-tuned for task '{task}'; load it with {autos[task].__name__}$"):
            wrong.from_pretrained(tune(kind, task, labels).path)
    tiny: Any = tiny_xlnet if kind == "xlnet" else tiny_model
    tiny().save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="is not fine-tuned, so it has no head"):
        AutoModelForQuestionAnswering.from_pretrained(tmp_path / "plain")


def test_a_text_without_tokens_is_refused(tune: Callable[..., Tuned]) -> None:
    tuned = tune("transformer_xl", "classification", LABELS)
    model = AutoModelForSequenceClassification.from_pretrained(tuned.path)
    with pytest.raises(ValueError, match="text 1 has no tokens; leave it out"):
        model(torch.zeros(2, 3, dtype=torch.int64), attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_two_programs_call_a_model_xlnet(tune: Callable[..., Tuned], tmp_path: Path) -> None:
    """Importing ours leaves transformers' own as it is."""
    config = transformers.XLNetConfig(vocab_size=13, d_model=6, n_layer=1, n_head=2, d_inner=7, num_labels=3)
    theirs = transformers.XLNetForSequenceClassification(config)
    theirs.save_pretrained(tmp_path / "theirs")
    assert type(AutoConfig.for_model("xlnet", n_layer=3)) is transformers.XLNetConfig
    assert type(AutoConfig.from_pretrained(tmp_path / "theirs")) is transformers.XLNetConfig
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs")
    assert type(again) is transformers.XLNetForSequenceClassification
    ours = AutoConfig.from_pretrained(tune("xlnet", "classification", LABELS).path)
    assert type(ours) is XLNetPretrainedConfig
    assert (ours.num_labels, ours.id2label, ours.problem_type) == (3, dict(enumerate(LABELS)), "single_label_classification")


def test_the_second_half_of_a_batch_is_read_backward_as_transformers_does(tmp_path: Path) -> None:
    """What its `bi_data` means; a text alone, for which transformers returns nothing, is read forward."""
    config = transformers.XLNetConfig(vocab_size=13, d_model=6, n_layer=2, n_head=2, d_inner=7, num_labels=3, bi_data=True)
    theirs = random_weights(transformers.XLNetForSequenceClassification(config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ours = XLNetForSequenceClassification.from_pretrained(tmp_path / "ours")
    ids = torch.randint(0, 13, (4, 6))
    with torch.no_grad():
        assert_close("logits", ours(ids).logits, theirs(ids).logits, 1e-6)
        forward = transformers.XLNetForSequenceClassification.from_pretrained(tmp_path / "theirs", bi_data=False).eval()
        assert_close("alone", ours(ids[:1]).logits, forward(ids[:1]).logits, 1e-6)
        assert (forward(ids).logits - theirs(ids).logits).abs()[2:].max() > 1e-3


def test_unknown_keys_of_a_fine_tuned_xlnet_are_refused(tune: Callable[..., Tuned]) -> None:
    tuned = tune("xlnet", "classification", LABELS)
    edit(tuned.path / "config.json", auto_map={"AutoModel": "evil--module.Model"})
    for auto in (AutoConfig, AutoModelForSequenceClassification):
        with pytest.raises(ConfigError, match="unknown key 'auto_map'"):
            auto.from_pretrained(tuned.path)
