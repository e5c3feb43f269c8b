"""Write on from a prompt, token by token."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.inputs import Ids, integers
from transformer_xl.generation.requests import Chosen, Request, fresh_seed
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.stopping import Stopping
from transformer_xl.generation.writing import write
from transformer_xl.kernels.device import PrecisionName
from transformer_xl.model.base import LanguageModel


def generate(
    model: LanguageModel,
    prompt_ids: Ids,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    repetition_window: int | None = 64,
    logit_bias: Mapping[int, float] | None = None,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    mem_len: int | None = None,
    precision: PrecisionName = "fp32",
    compile: bool | Literal["auto"] = False,
) -> Iterator[int]:
    """Yield the tokens that a model writes after a prompt; `writing.write` writes many texts at once.

    Args:
        model: a language model; its weights must not change meanwhile.
        prompt_ids: token ids (at least one); a prompt of any length is read piece by piece.
        max_new_tokens: how many tokens to write at most.
        temperature: 1 draws as the model believes, lower is safer, 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the likeliest tokens that together have this probability.
        min_p: draw from tokens at least this many times as likely as the likeliest.
        repetition_penalty: above 1 makes tokens that were there less likely.
        repetition_window: how many of the last tokens count as being there; None: all.
        logit_bias: added to the scores of some token ids; -inf bans a token.
        stop_tokens: ids that end the text; they are not yielded.
        seed: makes the text repeatable, 0 … 2^64 - 1; None: another text each time.
        mem_len: positions of memory; None: the model's.
        precision: of weights and memory.
        compile: compile the reading of single tokens, which takes some seconds and needs a C++ compiler.

    Yields:
        Token ids, as soon as each is chosen.

    Raises:
        ConfigError: an option out of range, or options that contradict each other.
        TokenizerError: an empty prompt, or ids outside the vocabulary.
        ValueError: a prompt that is not integers, or of several texts.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        repetition_window=repetition_window,
        logit_bias=logit_bias or {},
    )
    stopping = Stopping(tokens=stop_tokens)
    stopping.check(model.config.vocab_size or 0)
    prompt = integers(prompt_ids, "prompt_ids").cpu().numpy()
    if prompt.ndim == 2 and len(prompt) == 1:  # a batch of one, as tokenizers of other libraries return it
        prompt = prompt[0]
    request = Request(
        prompt=prompt,
        seed=fresh_seed() if seed is None else seed,
        max_new_tokens=max_new_tokens,
        stop_tokens=stopping.tokens,
    )
    decoder = Decoder(model, mem_len=mem_len, precision=precision, compile=compile, expected_tokens=max_new_tokens)
    return (event.token for event in write(decoder, [request], sampling=sampling) if isinstance(event, Chosen))
