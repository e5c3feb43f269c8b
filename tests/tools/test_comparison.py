"""What can be compared, and what is refused or warned of."""

from pathlib import Path
from typing import Any

import pytest

from transformer_xl.config.run import RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from transformer_xl.tools.comparison import ComparedRun, check_units, check_validations

BYTES, CHARS, WORDS = ByteTokenizer(), CharTokenizer("abc"), WordTokenizer(["<unk>", "<eos>", "the"])


def run(name: str, tokenizer: Tokenizer = BYTES, **settings: Any) -> ComparedRun:
    return ComparedRun(name, Path(name), RunConfig(**settings), tokenizer)


def warned(*runs: ComparedRun, unit: Any = "nats") -> list[str]:
    warnings: list[str] = []
    check_units(runs, unit, warn=warnings.append)
    return warnings


def test_losses_per_token_of_other_vocabularies_are_refused() -> None:
    runs = run("one"), run("two", CHARS)
    with pytest.raises(ConfigError, match=r"'one' and 'two' differ, so nats per token cannot be compared; use --unit bpc$"):
        warned(*runs)
    assert warned(*runs, unit="bpc") == []


@pytest.mark.parametrize("unit", ["nats", "bpc"])
def test_no_unit_is_proposed_where_tokens_leave_text_out(unit: str) -> None:
    with pytest.raises(ConfigError, match=r"so no unit of loss can be compared; draw one picture for each$"):
        warned(run("one"), run("two", WORDS), unit=unit)
    assert warned(run("one", WORDS), run("two", WORDS), unit="bpc") == []


def test_losses_of_answers_are_no_losses_of_tokens() -> None:
    with pytest.raises(ConfigError, match=r"^'one' and 'two' predict each token and each answer token, so losses "):
        warned(run("one"), run("two", train={"loss": "answer", "max_steps": 1}))


def test_other_texts_are_warned_of_once() -> None:
    (line,) = warned(run("one"), run("two", data={"corpus": "ptb"}), run("three", data={"corpus": "text8"}))
    assert "data.corpus is " in line and line.endswith(" for 'one' and ptb for 'two'")


def test_validations_of_unlike_parts_of_a_text_are_warned_of() -> None:
    warnings: list[str] = []
    check_validations([run("one", eval={"max_tokens": None}), run("two", eval={"max_tokens": 9})], warn=warnings.append)
    assert warnings == [
        "validation reads the whole split for 'one', at most 9 tokens for 'two' (eval.max_tokens), so the levels of their "
        "curves cannot be compared"
    ]
    check_validations([run("one"), run("two")], warn=warnings.append)
    assert len(warnings) == 1
