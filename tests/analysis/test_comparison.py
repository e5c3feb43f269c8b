"""What can be compared, and what is refused or warned of."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_model
from transformer_xl.analysis.comparison import ComparedRun, check_same_text, check_units, check_validations
from transformer_xl.config import RunConfig
from transformer_xl.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from transformer_xl.errors import ConfigError
from transformer_xl.opening import Opened

BYTES, CHARS, WORDS = ByteTokenizer(), CharTokenizer("abc"), WordTokenizer(["<unk>", "<eos>", "the"])


def run(name: str, tokenizer: Tokenizer = BYTES, **settings: Any) -> ComparedRun:
    return ComparedRun(name, Path(name), RunConfig(**settings), tokenizer)


def warned(*runs: ComparedRun, unit: Any = "nats") -> list[str]:
    warnings: list[str] = []
    check_units(runs, unit, warn=warnings.append)
    return warnings


def test_losses_per_token_of_other_vocabularies_are_refused() -> None:
    runs = run("one"), run("two", CHARS)
    sizes = rf"the vocabularies of 'one' \(byte, 256\) and 'two' \(char, {CHARS.vocab_size}\)"
    with pytest.raises(ConfigError, match=rf"^{sizes} differ, so nats per token cannot be compared; use --unit bpc$"):
        warned(*runs)
    assert warned(*runs, unit="bpc") == []


@pytest.mark.parametrize("unit", ["nats", "bpc"])
def test_no_unit_is_proposed_where_tokens_leave_text_out(unit: str) -> None:
    with pytest.raises(ConfigError, match=r"so no unit of loss can be compared; draw one picture for each$"):
        warned(run("one"), run("two", WORDS), unit=unit)
    assert warned(run("one", WORDS), run("two", WORDS), unit="bpc") == []


def test_losses_of_answers_are_no_losses_of_tokens() -> None:
    with pytest.raises(ConfigError, match=r"^'one' predicts each token and 'two' predicts each answer token, so losses "):
        warned(run("one"), run("two", train={"loss": "answer", "max_steps": 1}))


def test_other_texts_are_warned_of_once() -> None:
    (line,) = warned(run("one"), run("two", data={"corpus": "ptb"}), run("three", data={"corpus": "text8"}))
    assert line.startswith("runs of different texts are on one picture: data.corpus is ")
    assert line.endswith(" for 'one' and ptb for 'two'; one text may be easier than another")


def test_validations_of_unlike_parts_of_a_text_are_warned_of() -> None:
    warnings: list[str] = []
    check_validations([run("one", eval={"max_tokens": None}), run("two", eval={"max_tokens": 9})], warn=warnings.append)
    assert warnings == [
        "validation reads the whole split for 'one', at most 9 tokens for 'two' (eval.max_tokens), so the levels of their "
        "curves cannot be compared"
    ]
    check_validations([run("one"), run("two")], warn=warnings.append)
    assert len(warnings) == 1


def opened(tokenizer: Tokenizer = BYTES, *, is_run: bool = True, **settings: Any) -> Opened:
    return Opened("it", tiny_model(), tokenizer, RunConfig(**settings), is_run)


@pytest.mark.parametrize(
    ("other", "options", "complaint"),
    [
        (opened(is_run=False), {}, "^'other' is a model without a corpus of its own; give --file or --corpus$"),
        (
            opened(CHARS),
            {},
            r"^vocabularies differ: 'one' has 256 tokens \(byte\), 'other' has \d+ tokens \(char\); losses ",
        ),
        (opened(CHARS), {"from_file": True}, "^vocabularies differ"),
        (opened(data={"corpus": "ptb"}), {}, "and 'ptb' for 'other'; choose a text for all with --corpus or --file$"),
        (
            opened(data={"split": (0.5, 0.25, 0.25)}),
            {},
            "one may be in the training split of the other, so give --file$",
        ),
    ],
)
def test_what_cannot_be_compared_token_by_token(other: Opened, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_same_text({"one": opened(), "other": other}, **options)


def test_vocabularies_of_one_size_differ_in_a_token() -> None:
    with pytest.raises(ConfigError, match=r"^vocabularies differ: 'a' has 'b' as token 1, 'b' has 'c'; losses of different"):
        check_same_text({"a": opened(CHARS), "b": opened(CharTokenizer("acd"))})


def test_another_text_makes_models_comparable(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    models = {"one": opened(), "other": opened(data={"corpus": "ptb"}), "exported": opened(is_run=False)}
    check_same_text(models, from_file=True)
    check_same_text(models, corpus=str(tmp_path / "text.txt"))
