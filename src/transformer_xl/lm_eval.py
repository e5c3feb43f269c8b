"""Models of this package in lm-evaluation-harness, as `--model txl`: `python -m transformer_xl.lm_eval run --model txl …`.

Memory begins empty for each document, after a line end. A context that several continuations share is read once. A document
of any length is read in one pass, with the memory that goes with it.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from transformer_xl.errors import TxlError, one_line
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import Finished, FinishReason, Request
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.stopping import Stopping, Transcript
from transformer_xl.generation.writing import write
from transformer_xl.model.precision import PrecisionName, precision_of_segments
from transformer_xl.opening import open_run
from transformer_xl.reading.tasks import WINDOW
from transformer_xl.reading.token_nats import SideBySide
from transformer_xl.surprisal import line_end

_TGT_LEN = 64


@register_model("txl")
class TxlLM(TemplateLM):
    """A run, an exported model or a hub id. Every token sees exactly the `mem_len` tokens before it.

    Args:
        pretrained: the run, directory or hub id.
        batch_size: texts side by side; "auto": 64.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: of the matrix products.
        mem_len: positions of memory; None: the model's.
        max_gen_toks: tokens to write, where a task does not say.
        share_contexts: False reads a context again for each continuation, for comparison.
        max_batch_size: ignored.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str = 64,
        device: str | None = None,
        precision: PrecisionName = "auto",
        mem_len: int | None = None,
        max_gen_toks: int = 256,
        share_contexts: bool = True,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        has_it = device and (not device.startswith("cuda") or torch.cuda.is_available())  # the harness asks for cuda:0 anywhere
        opened = open_run(pretrained, device=device if device and has_it else "auto")
        self._device, self._tokenizer = opened.device, opened.tokenizer
        self._model = opened.model.with_context(mem_len=mem_len)
        self._batch_size = int(batch_size) if str(batch_size).isdecimal() else 64
        self._precision: Any = precision_of_segments(precision, opened.device)
        self._scorer = SideBySide(self._model, batch_size=self._batch_size, tgt_len=_TGT_LEN, precision=self._precision)
        self._max_gen_toks, self._shares = max_gen_toks, share_contexts
        self._before = line_end(opened.tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The line end, which every document follows."""
        return int(self._before[0]) if len(self._before) else 0

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, without a line end before it."""
        return self._tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return log-likelihoods, and whether each continuation is what the model would write."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, _) in enumerate(requests):
            groups.setdefault(tuple(context), []).append(i)
        shared = [own for own in groups.values() if len(own) > 1 and self._shares]
        n, others = WINDOW * self._batch_size, sorted(set(range(len(requests))).difference(*shared))
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="log-likelihoods") as bar:
            for own in [*shared, *(others[first : first + n] for first in range(0, len(others), n))]:
                contexts = [self._after_line_end(requests[i][1]) for i in own]
                rests = [np.array(requests[i][2], np.int64) for i in own]
                after = contexts[0][:-1] if own in shared else contexts[0][:0]
                texts = [np.concatenate([each[len(after) :], rest]) for each, rest in zip(contexts, rests, strict=True)]
                scored = self._scorer.score(texts, after=after, n_asked=list(map(len, rests)), likeliest=True)
                for i, one in zip(own, scored, strict=True):
                    found[i] = (-float(one.nats.sum(dtype=np.float64)), bool(one.likeliest.all()))
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
                bar.update(len(own))
        return [found[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each document, read in one pass."""
        found: list[float] = []
        n = WINDOW * self._batch_size
        for first in tqdm(range(0, len(requests), n), disable=disable_tqdm, desc="documents"):
            texts = [self._after_line_end(self.tok_encode(request.args[0])) for request in requests[first : first + n]]
            found += [-float(one.nats.sum(dtype=np.float64)) for one in self._scorer.score(texts)]
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to a stop string or a number of tokens."""
        drafts = [_Draft(self, *request.args) for request in requests]
        n_row = max(1, min(self._batch_size, len(drafts)))
        decoder = Decoder(self._model, batch_size=n_row, tgt_len=_TGT_LEN, precision=self._precision)
        with tqdm(total=len(drafts), disable=disable_tqdm, desc="texts") as bar:
            for event in write(decoder, [draft.request for draft in drafts], sampling=Sampling()):
                bar.update(isinstance(event, Finished))
        return [draft.text for draft in drafts]

    def _after_line_end(self, ids: Sequence[int]) -> np.ndarray:
        own = np.array(ids, np.int64)
        return own if len(own) and own[0] == self.eot_token_id else np.concatenate([[self.eot_token_id], own])


class _Draft:
    """A text that is written after a context."""

    def __init__(self, lm: TxlLM, context: str, settings: dict[str, Any]) -> None:
        ids, until = lm._after_line_end(lm.tok_encode(context)), settings.get("until") or []
        strings = [until] if isinstance(until, str) else [each for each in until if each]
        self._transcript, self._pieces = Transcript(lm._tokenizer, ids, Stopping(strings=strings)), []
        drawn = {name: settings[name] for name in ("top_k", "top_p") if settings.get(name)}
        temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
        n = settings.get("max_gen_toks") or lm._max_gen_toks
        sampling = Sampling(temperature=temperature, **(drawn if temperature else {}))
        self.request = Request(prompt=ids, seed=0, sampling=sampling, max_new_tokens=n, ends=self._add)

    def _add(self, token: int) -> FinishReason | None:
        self._pieces.append(self._transcript.push(token))
        return None if self._transcript.stopped_by is None else "stop"

    @property
    def text(self) -> str:
        """What was written, once it is finished."""
        return "".join(self._pieces) + ("" if self._transcript.stopped_by is not None else self._transcript.finish())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    try:
        cli_evaluate()
    except TxlError as error:
        sys.exit(f"txl: error: {one_line(error)}")
