"""Write on from a prompt, token by token."""

from collections.abc import Iterator, Sequence

import torch

from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.sampling import Sampling
from transformer_xl.model.precision import Precision
from transformer_xl.model.transformer_xl import TransformerXL


def generate(
    model: TransformerXL,
    prompt_ids: Sequence[int] | torch.Tensor,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    mem_len: int | None = None,
    precision: Precision = "fp32",
) -> Iterator[int]:
    """Yield the tokens that a model writes after a prompt.

    Args:
        model: a language model.
        prompt_ids: token ids (at least one); a prompt of any length is read segment by segment.
        max_new_tokens: how many tokens to write.
        temperature: 1 draws as the model believes, lower is safer, 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: makes the text repeatable; None: another text each time.
        mem_len: positions of memory; None: the model's.
        precision: of the matrix products.

    Yields:
        Token ids, as soon as each is chosen.

    Raises:
        ConfigError: a sampling option out of range.
        TokenizerError: an empty prompt, or ids outside the vocabulary.
    """
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens ({max_new_tokens}) must be at least 0")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    ids = torch.as_tensor(prompt_ids, dtype=torch.int64).flatten()
    vocab_size = model.config.vocab_size or 0
    if len(ids) == 0:
        raise TokenizerError("the prompt is empty; give at least one token, of text that the tokenizer keeps (--prompt TEXT)")
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocab_size:
            raise TokenizerError(f"token id {extreme} is outside the vocabulary ({vocab_size}); is this the model's tokenizer?")
    return _tokens(Decoder(model, mem_len=mem_len, precision=precision), ids, sampling, max_new_tokens, seed)


def _tokens(decoder: Decoder, ids: torch.Tensor, sampling: Sampling, n: int, seed: int | None) -> Iterator[int]:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    for _ in range(n):
        chosen = sampling.choose(decoder.feed(ids[None]), generator)
        yield int(chosen)
        ids = chosen
