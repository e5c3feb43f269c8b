"""Finds which tokens raised or lowered the predictions of the segments that gain most from memory.

Leaving a token out of a segment changes all predictions after it at once, so a segment takes as many rows as it has keys.

Shapes: n predictions, of a segment or of all, G tokens that have gates, K tokens kept of each list.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from transformer_xl.batch import NOT_SCORED
from transformer_xl.explain.attribution import GatedText, gated_texts, spearman
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.stream import scoring

FOLLOWED = 2
"""Segments through which an estimate follows the memory, the last one included."""
_KEPT = 12
_PRODUCTS = 6e11  # multiplications, about: half a minute on two cores
_PER_KEY = 300  # as long as so many takes what attention does besides products, for each query, key and head


@dataclass(frozen=True)
class Causes:
    """The tokens that changed predictions most."""

    places: np.ndarray  # int64 (n,), the tokens that are predicted
    rivals: np.ndarray  # int64 (n,), the likeliest other token of each
    distances: np.ndarray  # int64 (n, 3, K), back to the tokens that changed it most, see `nats`
    nats: np.ndarray  # float32 (n, 3, K): left out; left out, against the rival; estimated, of tokens from before the memory
    trust: tuple[float, float] | None  # rank correlation with leaving out, of estimate and attention; None: all is estimated


def affordable(model: LanguageModel, reading: Reading) -> int:
    """Return for how many segments causes are found in about half a minute; of a large model, none."""
    T, S = reading.tgt_len, reading.view(model).mem_len + reading.tgt_len
    per_token = sum(p.numel() for p in model.layers.parameters())
    per_token += sum(block.n_head * (_PER_KEY + 3 * block.d_head) * S for block in model.attention_blocks())
    return int(_PRODUCTS // (per_token * T * (S + 3 * FOLLOWED * T)))


def find_causes(
    model: LanguageModel,
    ids: np.ndarray,
    reading: Reading,
    top_ids: np.ndarray,
    begins: set[int],
    report: Callable[[int], object],
) -> Causes | None:
    """Return what changed the predictions of the segments (`Reading.tgt_len`) that begin at these places; None: of none.

    `top_ids` (N - 1, k) are the likeliest tokens, two at least, from the second token on.
    """
    if not begins:
        return None
    parts: list[tuple[np.ndarray, ...]] = []
    with scoring(model):
        for text in gated_texts(reading.view(model), ids[:-1], begins, tgt_len=reading.tgt_len, segments=FOLLOWED):
            n = (text.end - 1) % reading.tgt_len + 1
            parts.append(_of_segment(text, ids, top_ids, text.end - n + 1 + np.arange(n)))
            report(n)
    *arrays, trust = map(np.concatenate, zip(*parts, strict=True))
    return Causes(*arrays, trust=(float(trust[:, 0].mean()), float(trust[:, 1].mean())) if len(trust) else None)


def _of_segment(text: GatedText, ids: np.ndarray, top_ids: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the attributes of `Causes` for the last tokens of a segment, with the correlations (n, 2) of each."""
    n, near, best = len(places), GatedText(text.model, text.pieces[-1:]), top_ids[places - 1]
    rivals = np.where(best[:, 0] == ids[places], best[:, :2][:, -1], best[:, 0])
    columns, label = torch.arange(-n, 0) + text.pieces[-1][0].shape[1], torch.from_numpy(ids[places])
    each = columns.unsqueeze(1), label.unsqueeze(1), torch.full((n, 1), NOT_SCORED)
    far, trust = text.gradient(each), np.zeros((0, 2))
    lists = [(far, text.places)] * 3
    if text.model.attention_blocks():
        both = torch.cat([label, torch.from_numpy(rivals)])[None]
        exact = near.left_out((columns.repeat(2)[None], both, torch.full_like(both, NOT_SCORED))).T
        seen = near.places < places[:, None] - 1
        exact, against = exact[:n] * seen, (exact[:n] - exact[n:]) * seen
        lists = [(exact, near.places), (against, near.places), (far * (text.places < near.places[0]), text.places)]
        estimates = near.gradient(each), near.attention()[-n:]
        rows = [[spearman(exact[i][seen[i]], of[i][seen[i]]) for of in estimates] for i in range(n) if seen[i].sum() > 2]
        trust = np.reshape(rows, (-1, 2))
    distances, nats = zip(*(_strongest(nats, causes, places) for nats, causes in lists), strict=True)
    return places, rivals, np.stack(distances, axis=1), np.stack(nats, axis=1), trust


def _strongest(nats: np.ndarray, causes: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distances and nats (n, K) of the tokens (G,) that changed predictions (n, G) most; 0 where there are fewer."""
    missing = max(_KEPT - len(causes), 0)
    nats, causes = np.pad(nats, ((0, 0), (0, missing))), np.pad(causes, (0, missing))
    chosen = np.argsort(-np.abs(nats), axis=1, kind="stable")[:, :_KEPT]
    nats = np.take_along_axis(nats, chosen, axis=1).astype(np.float32)
    return np.where(nats == 0, 0, places[:, None] - causes[chosen]), nats
