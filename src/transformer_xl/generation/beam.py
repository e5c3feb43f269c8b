"""Beam search: write on from prompts as likely as possible, several texts side by side in the rows of a `Decoder`.

Each text has K rows, one for each of its beams. Its prompt is read once, in the first of them; the step after that copies what
the row has read to the rows of the others, as every step moves rows to where their texts go on.

Shapes: G texts side by side, K beams of each, B rows (at least G x K), R rows that write, C tokens that may follow one row.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_xl.errors import Bounds, ConfigError, TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.drawing import require_drawable
from transformer_xl.generation.inputs import EMPTY_PROMPT, Ids, text_ids
from transformer_xl.generation.scores import Scores
from transformer_xl.generation.stopping import Stopping
from transformer_xl.model.softmax import check_ids

_DEAD = -math.inf
"""The log-probability of a beam that writes nothing."""

_ROOM = 64
"""Tokens for which more room is made at once."""


class Hypothesis(NamedTuple):
    """One way in which a text may go on.

    Attributes:
        tokens: ids of what follows the prompt, without the stop token.
        log_probability: nats that the model gives to all of it, the stop token included; 0 or less.
        score: the log-probability divided by the length penalty, by which hypotheses are compared.
        stop_token: the stop token that ended it; None: it has as many tokens as were allowed.
    """

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    stop_token: int | None = None


def beam_search(
    decoder: Decoder,
    prompts: Iterable[Ids],
    *,
    beams: int = 4,
    max_new_tokens: int = 200,
    n: int = 1,
    stop_tokens: Collection[int] = (),
    banned_tokens: Collection[int] = (),
    length_penalty: float = 1.0,
    on_found: Callable[[int, list[Hypothesis]], object] = lambda number, found: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[list[Hypothesis]]:
    """Return the best continuations of prompts that a beam search finds.

    Of all texts that are one token longer than those of its beams, a step keeps the likeliest `beams`. A text that a stop token
    has ended is finished; it takes its beam out of the search, so that `beams` texts are found in the end. With one beam this
    is what temperature 0 writes. Of equally likely texts the one with the better beam, then with the lowest id, comes first.

    Finished texts of different lengths are compared by log P / ((5 + n) / 6)^length_penalty, where n counts all tokens, also a
    stop token (Wu et al. 2016, arXiv 1609.08144, eq. 14). Hugging Face divides by n^length_penalty: there a second token halves
    what a text costs, here it takes a seventh, so that short answers are not pushed to grow. A text is given up early only if
    none of its beams can get among the `n` best any more, so the result is as without.

    Args:
        decoder: every row forgets what it has read; `batch_size` // `beams` texts are written side by side.
        prompts: token ids (at least one) of each text. Each is read once, whatever `beams` is.
        beams: how many texts are kept at each step for each prompt.
        max_new_tokens: how many tokens to write at most, the stop token included.
        n: how many hypotheses to return for each prompt, at most `beams`.
        stop_tokens: ids that end a text; they are not part of it.
        banned_tokens: ids that are never written; the probabilities of the others stay the model's.
        length_penalty: 0 compares plain log-probabilities, higher values prefer longer texts, negative ones shorter texts.
        on_found: called with the number of a prompt and its hypotheses as soon as they are found.
        interrupted: asked after each piece of a prompt and each step; True ends the search.

    Returns:
        For each prompt, in order, its hypotheses, the best first; fewer than `n` only if there are no more, and none if the
        search was interrupted before.

    Raises:
        ConfigError: an option out of range, more beams than rows, or no token that can be written.
        TokenizerError: an empty prompt, or ids outside the vocabulary; nothing has been read then.
        ValueError: a prompt that is not integers, or of several texts; nothing has been read then.

    Example:
        >>> from transformer_xl import Decoder, TransformerXL, TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> found = beam_search(Decoder(model, batch_size=6), [[0, 1], [2], [3, 1, 3]], beams=3, n=2, max_new_tokens=5)
        >>> [[len(hypothesis.tokens) for hypothesis in of_prompt] for of_prompt in found]
        [[5, 5], [5, 5], [5, 5]]
    """
    _check_sizes(decoder, beams, n, max_new_tokens, length_penalty)
    vocab_size = decoder.model.vocab_size
    Stopping(tokens=stop_tokens).check(vocab_size)
    stop, banned = (torch.tensor(sorted(set(ids)), dtype=torch.int64) for ids in (stop_tokens, banned_tokens))
    check_ids(banned, vocab_size=vocab_size)
    queue = deque((number, _checked(ids, number, vocab_size)) for number, ids in enumerate(prompts))
    found: list[list[Hypothesis]] = [[] if max_new_tokens else [Hypothesis((), 0.0, 0.0)] for _ in queue]
    if max_new_tokens == 0:
        queue.clear()
    table = _Beams(decoder, beams, max_new_tokens, n, stop, banned, length_penalty)
    decoder.reset()
    while queue or table.writes:
        while queue and None in table.texts:
            for _ in table.read(*queue.popleft()):
                if interrupted():
                    return found
        for number, hypotheses in table.step():
            found[number] = hypotheses
            on_found(number, hypotheses)
        if interrupted():
            break
    return found


def _check_sizes(decoder: Decoder, beams: int, n: int, max_new_tokens: int, length_penalty: float) -> None:
    """Refuse numbers out of range."""
    Bounds(1, whole=True).check("beams", beams)
    Bounds(1, beams, whole=True).check("n", n)
    Bounds(0, whole=True).check("max_new_tokens", max_new_tokens)
    if not -30 <= length_penalty <= 30:  # beyond, powers of long texts are no numbers any more
        raise ConfigError(f"length_penalty ({length_penalty}) must be between -30 and 30; 0 compares plain log-probabilities")
    if beams > decoder.batch_size:
        raise ConfigError(
            f"beams ({beams}) need as many rows, and the decoder has {decoder.batch_size}; open it with "
            f"Decoder(model, batch_size={beams}), or a multiple of {beams} for several texts side by side"
        )


def _checked(ids: Ids, number: int, vocab_size: int) -> Tensor:
    prompt = text_ids(ids, f"prompt {number}")
    check_ids(prompt, vocab_size=vocab_size)
    if len(prompt) == 0:
        raise TokenizerError(f"prompt {number}: {EMPTY_PROMPT}")
    return prompt


@dataclass
class _Beams:
    """The beams of G texts. Beam k of text g writes in row g x K + k, and its beams are in order, the likeliest first."""

    decoder: Decoder
    n_beam: int
    n_most: int  # tokens of a text
    n_wanted: int
    stop: Tensor
    banned: Tensor
    length_penalty: float

    def __post_init__(self) -> None:
        n_text = self.decoder.batch_size // self.n_beam
        self.texts: list[int | None] = [None] * n_text  # number of the prompt; None: the rows are free
        self._finished: list[list[Hypothesis]] = [[] for _ in range(n_text)]
        self._n_following = min(self.n_beam + len(self.banned), self.decoder.model.vocab_size)
        self._scores: Scores | None = None  # of the last step; who has just read a prompt needs new ones
        self._n = torch.zeros(n_text, dtype=torch.int64)  # tokens that the beams of a text have
        self._total_GK = torch.full((n_text, self.n_beam), _DEAD, dtype=torch.float64)
        self._written_GKn = torch.zeros(n_text, self.n_beam, _ROOM, dtype=torch.int64)

    @property
    def writes(self) -> bool:
        """Whether there are texts."""
        return any(text is not None for text in self.texts)

    def read(self, number: int, prompt: Tensor) -> Iterator[None]:
        """Begin a text in a free place: read its prompt, piece by piece, in the row of its first beam.

        This beam alone writes the first token.
        """
        place = self.texts.index(None)
        row = place * self.n_beam
        self.decoder.reset(torch.arange(self.decoder.batch_size) == row)
        for piece in prompt.split(self.decoder.tgt_len):
            self.decoder.advance(row, piece)
            yield
        self.texts[place] = number
        self._n[place], self._finished[place], self._scores = 0, [], None
        self._total_GK[place] = torch.tensor([0.0] + [_DEAD] * (self.n_beam - 1))

    def step(self) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Let each text go on with the likeliest of what may follow its beams; yield those that are done."""
        parent_GK, token_GK = self._choose()
        at_GK1 = self._n.view(-1, 1, 1).expand(-1, self.n_beam, 1)
        if self._written_GKn.shape[2] == self._n.max():
            self._written_GKn = torch.nn.functional.pad(self._written_GKn, (0, _ROOM))
        self._written_GKn = self._written_GKn.gather(1, parent_GK.unsqueeze(2).expand_as(self._written_GKn))
        self._written_GKn.scatter_(2, at_GK1, token_GK.unsqueeze(2))
        self._n += torch.tensor([text is not None for text in self.texts])
        self._finish(token_GK)
        for place, number in enumerate(self.texts):
            if number is not None and self._is_done(place):
                self.texts[place], self._n[place], self._total_GK[place] = None, 0, _DEAD
                yield number, self._best(place)
        alive = self._total_GK.flatten() > _DEAD
        if alive.any():
            own = torch.arange(self.decoder.batch_size)
            tokens, active, sources = torch.zeros_like(own), own < 0, own.clone()
            n_row = len(alive)
            tokens[:n_row], active[:n_row] = token_GK.flatten(), alive
            first_row_G1 = own[: n_row : self.n_beam].unsqueeze(1)
            sources[:n_row] = torch.where(alive, (first_row_G1 + parent_GK).flatten(), own[:n_row])
            self.decoder.reorder(sources)
            self._scores = self.decoder.step(tokens, active=active)

    def _choose(self) -> tuple[Tensor, Tensor]:
        """Return the beams (G, K) that the new ones go on from, and their tokens (G, K); the new totals are kept."""
        before_X = self._total_GK.flatten()
        row_R = (before_X > _DEAD).nonzero().squeeze(1)
        scores = self._scores or self.decoder.scores
        nats_RC, ids_RC = scores.top(self._n_following, rows=row_R.tolist())
        nats_RC = nats_RC.masked_fill(torch.isin(ids_RC, self.banned), _DEAD)
        require_drawable(not nats_RC.isnan().any() and bool((nats_RC > _DEAD).any(1).all()))
        total_XC = torch.full((len(before_X), self._n_following), _DEAD, dtype=torch.float64)
        token_XC = torch.zeros(total_XC.shape, dtype=torch.int64)
        total_XC[row_R], token_XC[row_R] = before_X[row_R].unsqueeze(1) + nats_RC, ids_RC
        # stable, so that of equal totals the better beam comes first, and then the lower id
        total, order = total_XC.view(len(self.texts), -1).sort(dim=1, descending=True, stable=True)
        order_GK = order[:, : self.n_beam]
        n_left = self.n_beam - torch.tensor([len(finished) for finished in self._finished])
        is_left_GK = torch.arange(self.n_beam) < n_left.unsqueeze(1)
        self._total_GK = total[:, : self.n_beam].where(is_left_GK, _DEAD)
        return order_GK // self._n_following, token_XC.view(len(self.texts), -1).gather(1, order_GK)

    def _finish(self, token_GK: Tensor) -> None:
        """Take beams out of the search that a stop token has ended, or that are as long as allowed."""
        is_stop_GK = torch.isin(token_GK, self.stop)
        ended_GK = (is_stop_GK | (self._n == self.n_most).unsqueeze(1)) & (self._total_GK > _DEAD)
        for place, k in ended_GK.nonzero().tolist():
            n, total, is_stop = int(self._n[place]), float(self._total_GK[place, k]), bool(is_stop_GK[place, k])
            tokens = self._written_GKn[place, k, :n].tolist()
            stop_token = tokens.pop() if is_stop else None
            self._finished[place].append(Hypothesis(tuple(tokens), total, total / self._penalty(n), stop_token))
        self._total_GK = self._total_GK.masked_fill(ended_GK, _DEAD)

    def _penalty(self, n: int) -> float:
        return ((5 + n) / 6) ** self.length_penalty

    def _best(self, place: int) -> list[Hypothesis]:
        return sorted(self._finished[place], key=lambda hypothesis: -hypothesis.score)[: self.n_wanted]

    def _is_done(self, place: int) -> bool:
        """Return whether no beam of a text can get among its best any more.

        A log-probability only sinks. So a beam reaches at most what it has now, divided by the greatest penalty of the lengths
        that it may still have: that of the longest, or with a negative exponent that of the shortest.
        """
        total = float(self._total_GK[place].max())
        best = self._best(place)
        reachable = total / max(self._penalty(int(self._n[place]) + 1), self._penalty(self.n_most))
        return total == _DEAD or (len(best) == self.n_wanted and best[-1].score >= reachable)
