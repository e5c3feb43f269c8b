"""`generate`: one text, token by token."""

from typing import Any

import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation.choice import choose
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.generate import generate
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.seeds import seeded_generator


def write(sampling: Sampling = Sampling(), **options: Any) -> list[int]:
    torch.manual_seed(0)
    return list(generate(tiny_model(), [1, 2, 3], sampling, **{"max_new_tokens": 30, "seed": 5, **options}))


def test_a_seed_gives_the_same_text_twice() -> None:
    texts = [write(seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    unseeded = [tuple(write(seed=None)) for _ in range(3)]
    assert len(set(unseeded)) > 1


def test_tokens_come_as_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    for name in ("advance", "step"):
        method = getattr(Decoder, name)
        monkeypatch.setattr(
            Decoder,
            name,
            lambda self, *given, method=method, **rest: (read.append(len(given[-1])), method(self, *given, **rest))[1],
        )
    stream = generate(tiny_model(), [1] * 300, max_new_tokens=3)
    assert read == []
    next(stream)
    assert read == [64, 64, 64, 64, 44]
    assert len(list(stream)) == 2
    assert read[5:] == [1, 1]  # the last token is not read: nothing comes after it


def test_every_option_of_the_sampling_has_its_effect() -> None:
    """The text is that of a loop over the definition of the sampling, with all that was there before as history."""
    options: dict[str, Any] = {
        "temperature": 1.3,
        "top_k": 8,
        "top_p": 0.85,
        "min_p": 0.2,
        "repetition_penalty": 1.4,
        "repetition_window": 3,
        "logit_bias": {4: 1.5, 7: float("-inf")},
    }
    torch.manual_seed(0)
    model, sampling, history = tiny_model(), Sampling(**options), [1, 2, 3]
    decoder, generator = Decoder(model), seeded_generator(5)
    scores = decoder.read([history])
    for _ in range(30):
        history.append(choose(scores, 0, sampling, history, generator))
        scores = decoder.read([history[-1:]])
    assert write(sampling) == history[3:]
    for name, value in options.items():
        assert write(Sampling(**{name: value})) != write() or name == "repetition_window", name
    assert write(Sampling(repetition_penalty=1.4, repetition_window=3)) != write(Sampling(repetition_penalty=1.4))


def test_a_stop_token_ends_the_text_and_is_not_part_of_it() -> None:
    whole = write()
    stop = whole[10]
    assert write(stop_tokens=[stop]) == whole[: whole.index(stop)]


def test_precision_and_compilation_may_be_left_to_the_machine() -> None:
    assert write(compile="auto") == write()
    assert len(write(precision="auto")) == 30


@pytest.mark.parametrize(
    ("prompt", "options", "error", "match"),
    [
        ([], {}, TokenizerError, "the prompt is empty; give at least one token"),
        ([1, 13], {}, TokenizerError, r"token id 13 is outside the vocabulary \(13\); is this the model's tokenizer"),
        ([1], {"precision": "fp8"}, ConfigError, "unknown precision 'fp8'; known: auto, bf16, fp16, fp32, int8"),
        *(
            ([1], {"max_new_tokens": n}, ConfigError, r"max_new_tokens .* must be at least 0")
            for n in (-1, 2.5, True, None, "9")
        ),
        (
            [1],
            {"sampling": Sampling(logit_bias={13: 1.0})},
            ConfigError,
            "logit_bias has token id 13, which is outside the vocabulary",
        ),
        ([1], {"stop_tokens": [13]}, ConfigError, "stop token id 13 is outside the vocabulary"),
        (
            [1],
            {"temperature": 0.8, "top_k": 2},
            TypeError,
            r"^generate got temperature, top_k; how to draw is a Sampling: .*$",
        ),
        ([1], {"sampling": 0.8}, TypeError, r"^generate got a value of type float; how to draw is a Sampling: generate\(.*\)$"),
        *(([1], {"seed": seed}, ConfigError, r"seed .* must be between 0 and 2\^64 - 1") for seed in (-1, 2**64)),
    ],
)
def test_what_cannot_be_written_is_refused(
    prompt: list[int], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        next(generate(tiny_model(), prompt, **options))
