"""`train` with `base`: what a run takes of another model, that it goes on without it, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import assert_close
from tests.training.helpers import Lines, differing, run_bits, stop_at
from tests.training.test_run import Start, refuse, starter
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.errors import CheckpointError, ConfigError, TokenizerError
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.tokenizers.kinds import CharTokenizer
from transformer_xl.training.finetune import finetune

LORA = "train.lora_rank=2"
pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Start:
    return starter(home, tmp_path)


@pytest.fixture(scope="module")
def base(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps of characters; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("bases")
    starter(home, folder)("base", "train.max_steps=8", "tokenizer.kind=char", "optim.lr=0.02")
    return folder / "base"


@pytest.fixture
def exported(base: Path, tmp_path: Path) -> Path:
    """The same model as a directory without a run."""
    model, tokenizer = load(base)
    model.save_pretrained(tmp_path / "exported")
    tokenizer.save(tmp_path / "exported" / "tokenizer.json")
    return tmp_path / "exported"


def unlike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if not torch.equal(a[name], b[name])}


def first_weights(run: Path) -> dict[str, torch.Tensor]:
    return CheckpointStore(run / "checkpoints").load(0).model


def killed_before_its_first_checkpoint(whole: Path, run: Path) -> None:
    """Make a run that has everything but what `whole` has saved since it began."""
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("step-*", "best.json", "metrics.jsonl"))


def test_a_run_begins_with_the_weights_and_the_vocabulary_of_its_base(start: Start, base: Path, tmp_path: Path) -> None:
    display = Lines()
    start("run", "train.max_steps=2", "train.keep_checkpoints=9", base=base, display=display)
    theirs, tokenizer = load(base)
    assert not unlike(first_weights(tmp_path / "run"), theirs.state_dict())
    assert RunDirectory(tmp_path / "run").tokenizer().fingerprint == tokenizer.fingerprint
    assert f"beginning with the weights of {base}" in display.said[0]
    config, its = RunDirectory(tmp_path / "run").config(), RunDirectory(base).config()
    assert (config.base, config.model, config.tokenizer) == (str(base), its.model, its.tokenizer)
    assert config.optim.lr == 0.01  # of the recipe
    assert unlike(load(tmp_path / "run")[0].state_dict(), theirs.state_dict())


def test_without_a_recipe_a_run_is_trained_as_its_base_was_but_on_this_machine(start: Start, tmp_path: Path) -> None:
    start("base", "train.max_steps=2", "train.threads=1", "compared_with=enwik8-small", "optim.lr=0.02")
    start("run", "train.max_steps=3", recipe=None, base=tmp_path / "base")
    config, its = (RunDirectory(tmp_path / name).config() for name in ("run", "base"))
    assert (config.name, config.optim, config.eval) == (its.name, its.optim, its.eval)
    assert (config.train.max_steps, config.train.batch_size) == (3, its.train.batch_size)
    assert (config.train.threads, config.compared_with) == (None, None)


def test_a_directory_without_a_run_is_a_base_too(start: Start, exported: Path, base: Path, tmp_path: Path) -> None:
    start("run", "train.max_steps=2", "train.keep_checkpoints=9", "model.mem_len=3", "model.dropout=0", base=exported)
    assert not unlike(first_weights(tmp_path / "run"), load(base)[0].state_dict())
    assert load(tmp_path / "run")[0].config.mem_len == 3
    assert RunDirectory(tmp_path / "run").config().tokenizer.kind == "char"


@pytest.mark.parametrize("overrides", [(), (LORA, "train.average=ema")], ids=" ".join)
def test_a_stopped_run_goes_on_exactly_without_its_base(
    start: Start, base: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    shutil.copytree(base, tmp_path / "base")
    arguments: dict[str, Any] = {"base": tmp_path / "base"}
    overrides = ("train.max_steps=16", "train.checkpoint_interval=4", "train.eval_interval=8", *overrides)
    start("whole", *overrides, **arguments)
    start("run", *overrides, **arguments, display=stop_at(10))
    shutil.rmtree(tmp_path / "base")
    start("run", *overrides, resume=True)
    assert differing(run_bits(tmp_path / "run"), run_bits(tmp_path / "whole")) == []


def test_a_run_killed_before_its_first_checkpoint_begins_with_its_base_again(start: Start, base: Path, tmp_path: Path) -> None:
    start("whole", "train.keep_checkpoints=9", "train.max_steps=4", base=base)
    killed_before_its_first_checkpoint(tmp_path / "whole", tmp_path / "run")
    start("run", resume=True)
    assert not unlike(first_weights(tmp_path / "run"), first_weights(tmp_path / "whole"))
    assert differing(run_bits(tmp_path / "run"), run_bits(tmp_path / "whole")) == []


def test_adapters_learn_and_are_merged_when_the_run_is_loaded(start: Start, base: Path, tmp_path: Path) -> None:
    display = Lines()
    start("run", LORA, "train.max_steps=4", base=base, display=display)
    assert " learn), vocabulary" in display.said[0]
    theirs, own = load(base)[0].state_dict(), load(tmp_path / "run")[0].state_dict()
    assert own.keys() == theirs.keys()
    assert unlike(own, theirs) == {
        name for name in own if name.startswith("layers.") and own[name].dim() == 2 and "norm" not in name
    }
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    names = store.load(store.steps()[-1]).training
    assert all("weight.0." in name for name in names if name.startswith("optimizer."))


def test_what_does_not_fit_a_base_is_refused(start: Start, base: Path, exported: Path) -> None:
    refuse(start, ConfigError, r"model.n_layer \(3\) differs from that of '.*base' \(2\), whose", "model.n_layer=3", base=base)
    for each in (base, exported):
        refuse(start, ConfigError, "kind=byte: the tokenizer of '.*' is used", "tokenizer.kind=byte", base=each)
    refuse(start, ConfigError, r"model.kind \(lstm\) differs", "model.kind=lstm", base=exported)
    refuse(start, CheckpointError, "gone", base=base / "gone")
    refuse(start, ConfigError, "is what --from sets", f"base={base}")
    refuse(start, ConfigError, r"train.lora_rank \(2\) adapts a model that has learned already; name it with --from", LORA)
    refuse(start, ConfigError, r"lora_rank \(2\) cannot be combined", LORA, "train.parallel=fsdp", base=base)


def test_an_empty_path_is_not_the_working_directory(
    start: Start, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("run", "train.max_steps=2")
    monkeypatch.chdir(base)
    for attempt in (
        lambda: load(""),
        lambda: start("other", base=""),
        lambda: start("other", recipe=None, base=""),
        lambda: start("run", base="", resume=True),
        lambda: finetune("", task="classification", data="texts.csv", out=tmp_path / "tuned"),
    ):
        with pytest.raises(ConfigError, match="the path of a run is empty"):
            attempt()


def test_a_run_goes_on_only_with_its_own_base(start: Start, base: Path, exported: Path, tmp_path: Path) -> None:
    start("run", "train.max_steps=2", base=base)
    start("other", "train.max_steps=2")
    start("run", base=base.parent / ".." / base.parent.name / "base", resume=True)  # the same, said otherwise
    with pytest.raises(CheckpointError, match=r"began with '.*base', not '.*exported'; leave it out"):
        start("run", base=exported, resume=True)
    with pytest.raises(CheckpointError, match=r"began with random weights, not '.*base'"):
        start("other", base=base, resume=True)
    with pytest.raises(CheckpointError, match=r"train.lora_rank \(2\) differs"):
        start("run", LORA, resume=True)


def greek(base: Path, folder: Path) -> Path:
    """Write the text that a base has read, and some characters that it has not."""
    path, config = folder / "greek.txt", RunDirectory(base).config()
    text = Path(config.data.corpus).read_text(encoding="utf-8")
    path.write_text(text + "\u03b1\u03b2\u03b2 " * 400, encoding="utf-8")
    return path


def test_characters_that_the_vocabulary_lacks_are_named(start: Start, base: Path, tmp_path: Path) -> None:
    text = greek(base, tmp_path)
    lacks = rf"^the vocabulary of '{base}' lacks 2 characters: β \(U\+03B2\) 800 times, α \(U\+03B1\) 400"
    refuse(start, TokenizerError, rf"{lacks}, which '{text}' has; add them by --grow, or", base=base, corpus=str(text))


def test_a_vocabulary_grows(start: Start, base: Path, tmp_path: Path) -> None:
    """New rows begin as the mean, also after a kill; scores of what the base knew are its own; and a run goes on exactly."""
    text = greek(base, tmp_path)
    arguments: dict[str, Any] = {"base": base, "grow": True, "corpus": str(text)}
    overrides = ("train.max_steps=8", "train.keep_checkpoints=9", "train.checkpoint_interval=2")
    start("whole", *overrides, **arguments, display=(display := Lines()))
    assert any(note.endswith("β (U+03B2) 800 times, α (U+03B1) 400; it grows by 2") for note in display.said)
    (old, known), (new, tokenizer) = load(base), load(tmp_path / "whole")
    assert isinstance(known, CharTokenizer) and isinstance(tokenizer, CharTokenizer)
    assert set(tokenizer.alphabet) == {*known.alphabet, "\u03b1", "\u03b2"}
    assert new.config.vocab_size == tokenizer.vocab_size == known.vocab_size + 2
    new.load_state_dict(first_weights(tmp_path / "whole"))
    old_text = known.alphabet * 3
    with torch.no_grad():
        expected = old.eval()(torch.from_numpy(known.encode(old_text))[None]).logits.log_softmax(-1)
        found = new.eval()(torch.from_numpy(tokenizer.encode(old_text))[None]).logits[..., tokenizer.encode(known.alphabet)]
    assert_close("log-probabilities", found.log_softmax(-1), expected, 1e-6)
    table = new.embedding.weight[tokenizer.encode("\u03b1\u03b2")]
    assert_close("new rows", table, old.embedding.weight.mean(0).expand(2, -1), 1e-6)

    killed_before_its_first_checkpoint(tmp_path / "whole", tmp_path / "run")
    start("run", resume=True, grow=True, corpus=str(text), display=stop_at(4))
    start("run", resume=True, corpus=str(text))
    assert not unlike(first_weights(tmp_path / "run"), first_weights(tmp_path / "whole"))
    assert differing(run_bits(tmp_path / "run"), run_bits(tmp_path / "whole")) == []


def test_what_cannot_grow_is_refused(start: Start, base: Path, home: Path, tmp_path: Path) -> None:
    refuse(start, ConfigError, "--grow adds to the vocabulary of a model that has one; name it with --from", grow=True)
    refuse(start, ConfigError, r"keeps from learning", LORA, base=base, grow=True)
    for name, overrides, complaint in (
        ("byte", (), "--grow: a vocabulary of kind 'byte' has all bytes; leave --grow out"),
        ("ngrams", ("tokenizer.kind=char", "model.ngram_rows=[50]"), r"--grow: tables of n-grams \(model.ngram_rows\)"),
        ("adaptive", ("tokenizer.kind=char", "model.cutoffs=[5]"), r"--grow: in an adaptive softmax \(model.cutoffs\), new"),
    ):
        starter(home, tmp_path)(name, "train.max_steps=1", *overrides)
        refuse(start, ConfigError, complaint, base=tmp_path / name, grow=True)
    complaint = r"and it cannot grow: tables of n-grams .* --set 'model.ngram_rows=\[\]' grows; leave them out of the text$"
    refuse(start, TokenizerError, complaint, base=tmp_path / "ngrams", corpus=str(greek(base, tmp_path)))
    complaint = r"^model.ngram_rows \(\[\]\) differs from that of '.*ngrams' \(\[50\]\), whose weights would"
    refuse(start, ConfigError, complaint, "model.ngram_rows=[]", base=tmp_path / "ngrams")


def test_the_loaded_model_has_the_loss_that_the_adapted_one_had(start: Start, base: Path, home: Path, tmp_path: Path) -> None:
    outcome = start("run", LORA, "train.lora_alpha=6", "optim.lr=0.05", "train.max_steps=8", base=base)
    assert outcome.score is not None
    opened = open_run(tmp_path / "run")
    text, reading = opened.text(split="valid"), opened.reading()
    score = evaluate(opened.model, text.ids, reading, precision="fp32")
    assert score.loss == pytest.approx(outcome.score.loss, abs=1e-6)
    assert unlike(load(tmp_path / "run")[0].state_dict(), load(base)[0].state_dict())


def test_models_without_linear_maps_and_fine_tuned_ones_are_refused(start: Start, base: Path, tmp_path: Path) -> None:
    lstm = ["model.kind=lstm", "train.max_steps=2"]
    start("lstm", *lstm)
    refuse(start, ConfigError, "adapts linear maps inside layers, and this model has none", LORA, base=tmp_path / "lstm")
    (tmp_path / "labelled.tsv").write_text("text\tlabel\n" + "a s\tgood\ns c\tbad\n" * 20)
    data = str(tmp_path / "labelled.tsv")
    tuned = ["train.max_steps=2", LORA]
    finetune(base, task="classification", data=data, out=tmp_path / "tuned", overrides=tuned, display=Lines())
    model, before = load(tmp_path / "tuned")[0], load(base)[0].state_dict()
    own = model.backbone.state_dict()
    changed = {name for name in before if not torch.equal(own[name], before[name])}
    assert changed and all(name.startswith("layers.") for name in changed)
    refuse(start, ConfigError, "is fine-tuned and predicts no tokens", base=tmp_path / "tuned")
