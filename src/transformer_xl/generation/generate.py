"""Write on from a prompt, token by token."""

from collections.abc import Collection, Iterator
from typing import Literal, Never

from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Draft
from transformer_xl.generation.inputs import Ids, integers
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scheduler import write
from transformer_xl.generation.seeds import fresh_seed
from transformer_xl.generation.stopping import Stopping
from transformer_xl.kernels.device import PrecisionName
from transformer_xl.model.base import LanguageModel


def generate(
    model: LanguageModel,
    prompt: Ids,
    sampling: Sampling = Sampling(),
    *,
    max_new_tokens: int = 200,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    mem_len: int | None = None,
    precision: PrecisionName = "fp32",
    compile: bool | Literal["auto"] = False,
    **unknown: Never,
) -> Iterator[int]:
    """Yield the tokens that a model writes after a prompt; `scheduler.write` writes many texts at once.

    Args:
        model: a language model; its weights must not change meanwhile.
        prompt: token ids (at least one); a prompt of any length is read piece by piece.
        sampling: how tokens are drawn.
        max_new_tokens: how many tokens to write at most.
        stop_tokens: ids that end the text; they are not yielded.
        seed: makes the text repeatable, 0 … 2^64 - 1; None: another text each time.
        mem_len: positions of memory; None: the model's.
        precision: of weights and memory.
        compile: compile the reading of single tokens, which takes some seconds and needs a C++ compiler.
        unknown: nothing else; a setting of `Sampling` belongs in `sampling`.

    Yields:
        Token ids, as soon as each is chosen.

    Raises:
        ConfigError: an option out of range, or a bias or a stop token that does not fit the vocabulary.
        TokenizerError: an empty prompt, or ids outside the vocabulary.
        TypeError: an unknown option, or a sampling that is no `Sampling`.
        ValueError: a prompt that is not integers, or of several texts.
    """
    if unknown or not isinstance(sampling, Sampling):
        given = ", ".join(unknown) or f"a value of type {type(sampling).__name__}"
        raise TypeError(f"generate got {given}; how to draw is a Sampling: generate(model, prompt, Sampling(temperature=0.8))")
    ids = integers(prompt, "prompt")
    draft = Draft(
        ids[0] if ids.ndim == 2 and len(ids) == 1 else ids,  # a batch of one, as tokenizers of other libraries return it
        seed=fresh_seed() if seed is None else seed,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stopping=Stopping(tokens=stop_tokens),
    )
    decoder = Decoder(model, mem_len=mem_len, precision=precision, compile=compile, expected_tokens=max_new_tokens)
    return (event.token for event in write(decoder, [draft]) if isinstance(event, Chosen))
