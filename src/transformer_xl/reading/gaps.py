"""Texts that an XLNet scores with both sides in sight: each token is a gap that it fills, given the rest of the text.

    nats of token t  =  -log p(x_t | x without x_t)    pseudo-log-likelihood

A text's sum is no probability: of two words that go together, such as "New York", each one shows the other. So do the tokens
of a word.

A text is read as in fine-tuning, `A <sep> <cls>` (`data/layout.py`), without memory, once for each of its tokens.

Reference: Salazar et al. 2020, "Masked Language Model Scoring" (arXiv 1910.14659).

Shapes: G texts of n tokens each, R readings at once, T = n + 2.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from transformer_xl.batch import Batch, Order, Pairs
from transformer_xl.data.layout import Layout
from transformer_xl.kernels.device import autocast
from transformer_xl.model.softmax import check_ids
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.stream import scoring
from transformer_xl.reading.targets import precision_of_targets
from transformer_xl.reading.texts import check_finite, windows
from transformer_xl.tokenizers.base import Tokenizer

_MOST_SCORES = 1 << 22  # of a head, so that long texts do not fill the memory


def gap_nats(
    model: XLNet,
    texts: Iterable[np.ndarray],
    tokenizer: Tokenizer,
    reading: Reading,
    *,
    skip: int = 0,
    is_ready: Callable[[], bool] | None = None,
) -> Iterator[np.ndarray]:
    """Yield the nats of each token of each text, fp32 (n,), in their order; texts of one length are read side by side.

    Args:
        model: its mode (training or not) is restored whenever a text is handed out.
        texts: integers (n,).
        tokenizer: of the model, with <sep> and <cls>.
        reading: how many rows are read at once, and their precision.
        skip: texts at the beginning that may get NaN, unread.
        is_ready: whether the next text is there already; None: they all are.

    Raises:
        TokenizerError: ids outside the model's vocabulary.
        ConfigError: precision int8, or a vocabulary without <sep> and <cls>.
        TrainingError: nats that are no numbers.
    """
    layout, n_done = Layout(tokenizer, model.kind), 0
    for window in windows(texts, reading.batch_size, is_ready, size=len):
        n_done += len(window)
        for ids in window:
            check_ids(ids, vocab_size=model.vocab_size)
        known = [np.full(len(ids), np.nan, np.float32) for ids in window]
        for n in sorted({len(ids) for ids in window} - {0}) if n_done > skip else ():
            places = [i for i, ids in enumerate(window) if len(ids) == n]
            with scoring(model):
                scored_Gn = _of_one_length(model, [window[i] for i in places], layout, reading)
            for i, nats in zip(places, scored_Gn, strict=True):
                known[i] = nats
        yield from known


def _of_one_length(model: XLNet, texts: Sequence[np.ndarray], layout: Layout, reading: Reading) -> np.ndarray:
    """Return the nats of all tokens of texts of n tokens each, fp32 (G, n)."""
    precision, view = precision_of_targets(reading.precision, model.device), model.with_context(mem_len=0)
    rows, n = [layout.row(ids) for ids in texts], len(texts[0])
    ids_GT = torch.from_numpy(np.stack([row.ids for row in rows])).long()
    T, nats = ids_GT.shape[1], torch.empty(len(texts) * n, dtype=torch.float32)
    segments_RT = torch.from_numpy(rows[0].segments).long().expand(reading.batch_size, T)
    for reading_R in torch.arange(len(nats)).split(max(1, min(reading.batch_size, _MOST_SCORES // T**2))):
        text_R, place_R1 = reading_R // n, (reading_R % n).unsqueeze(1)
        ids_RT, is_none_R = ids_GT[text_R], torch.zeros(len(text_R), dtype=torch.bool)
        hidden_RT = torch.arange(T) == place_R1
        order = Order(rank=hidden_RT.long() - 1, sees=torch.zeros_like(ids_RT), targets=place_R1)
        pairs = Pairs(order, segments_RT[: len(text_R)], backward=is_none_R, is_random=is_none_R)
        batch = Batch(ids_RT, ids_RT.gather(1, place_R1), extra=pairs).to(model.device)
        with autocast(model.device, precision):
            nll_R1 = view.loss(batch, mems=None).nll
        assert nll_R1 is not None
        nats[reading_R] = nll_R1[:, 0].float().cpu()
    check_finite(nats, precision)
    return nats.view(len(texts), n).numpy()
