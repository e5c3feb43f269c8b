"""Score an XLNet on a text: rows of two texts as in pretraining, whose targets and orders are the same every time.

The text is read in lanes as in training (`data/pairs.py`), with a memory that begins empty. Nats per target depend on how many
targets a row has and on what they see, so they compare models with the same layout only.
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from transformer_xl.batch import Batch
from transformer_xl.config.model import XLNetConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.data.pairs import PairStream
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.kernels.device import Precision, autocast, check_precision, choose_precision
from transformer_xl.model.call import Execution
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.evaluation import Score
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.stream import scoring
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.tokenizers.unigram import SentencePieceTokenizer
from transformer_xl.world import World

_CONTEXT = 10  # tokens shown before a gap, and half as many after it
_LEAST_STEPS = 8  # a memory that is never filled is worth nothing
_SENTENCE_ENDS = {".", "!", "?", "…", "<eop>"}


def pair_stream(
    config: RunConfig,
    ids: np.ndarray,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    document_starts: np.ndarray | None = None,
    fixed_draws: bool = False,
    world: World | None = None,
) -> PairStream:
    """Return the rows that a run's settings cut from a text; `fixed_draws` for scoring, which never shuffles.

    Raises:
        ConfigError: settings that do not fit together, or a vocabulary without the pieces that an XLNet needs.
        CorpusError: the text is too short.
    """
    model, world = config.model, world or World()
    assert isinstance(model, XLNetConfig)
    model = model.completed(vocab_size=tokenizer.vocab_size, tgt_len=config.train.tgt_len)
    assert model.reuse_len and model.num_predict
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise ConfigError(
            f"model.kind = 'xlnet' needs pieces with <sep> and <cls>, which a vocabulary of kind '{tokenizer.kind}' lacks; use "
            "tokenizer.kind=unigram"
        )
    ends = [piece.lstrip("\u2581") in _SENTENCE_ENDS or piece == tokenizer.line_end for piece in tokenizer.pieces]
    return PairStream(
        ids,
        batch_size=batch_size,
        tgt_len=config.train.tgt_len,
        reuse_len=model.reuse_len,
        num_predict=model.num_predict,
        word_starts=tokenizer.starts_word(),
        sentence_ends=np.array(ends),
        sep=tokenizer.id_of("<sep>"),
        cls=tokenizer.id_of("<cls>"),
        document_starts=document_starts,
        spans=model.spans,
        bi_data=model.bi_data,
        fixed_draws=fixed_draws,
        rank=world.rank,
        world_size=world.size,
        shuffle="none" if fixed_draws else config.data.shuffle,
        seed=0 if fixed_draws else config.train.seed,  # all models are asked the same
    )


def scored_stream(
    config: RunConfig,
    ids: np.ndarray,
    tokenizer: Tokenizer,
    *,
    document_starts: np.ndarray | None = None,
    world: World | None = None,
) -> PairStream:
    """Return the rows in which a text is scored: `eval.batch_size` side by side, or fewer, so that each goes on for a while.

    Raises:
        CorpusError: it is too short for one row of each process.
    """
    world, tgt_len = world or World(), config.train.tgt_len
    least = world.size * (2 if isinstance(config.model, XLNetConfig) and config.model.bi_data else 1)
    batch_size = max(config.eval.batch_size // least, 1) * least
    how: dict[str, Any] = {"document_starts": document_starts, "fixed_draws": True, "world": world}
    while batch_size > least and len(ids) < batch_size * _LEAST_STEPS * tgt_len:
        batch_size = max(batch_size // (2 * least), 1) * least
    try:
        return pair_stream(config, ids, tokenizer, batch_size=batch_size, **how)
    except CorpusError:
        raise CorpusError(
            f"{len(ids):,} tokens are too few to score: a row of each process has {tgt_len:,}; give a longer text, or for "
            "validation another data.split"
        ) from None


def precision_of_targets(name: str, device: torch.device) -> Precision:
    """Return the precision in which targets are scored; ConfigError for an unknown name or int8."""
    check_precision(name)
    if name == "int8":
        raise ConfigError("precision int8 is for models that read from left to right; use auto, fp32 or bf16")
    return choose_precision(name, device)[0]


def score_targets(
    model: XLNet,
    stream: PairStream,
    reading: Reading = Reading(),
    *,
    limit: int | None = None,
    on_tokens: Callable[[int], object] = lambda n: None,
    world: World | None = None,
    execution: Execution = Execution(),
) -> Score:
    """Return the nats of all targets of one pass through a stream.

    Args:
        model: it is put into evaluation mode and back.
        stream: at its beginning, see `scored_stream`, which says how long segments are, and how many are side by side.
        reading: memory and precision.
        limit: read at most about this many tokens; None: all.
        on_tokens: called with the number of tokens read after each step, by this process.
        world: processes that each read their lanes; all call this.
        execution: how to compute.

    Returns:
        Nats and the number of targets, which is also taken for that of characters.

    Raises:
        ConfigError: an unknown precision, or int8.
    """
    begin, world = time.perf_counter(), world or World()
    precision, nats, n_target = precision_of_targets(reading.precision, model.device), 0.0, 0
    n_step = stream.segments_per_epoch
    if limit is not None:
        n_step = min(n_step, max(1, math.ceil(limit / stream.tokens_per_step)))
    with scoring(model):
        view = model.with_context(mem_len=reading.mem_len)
        mems = None
        for batch in itertools.islice(stream, n_step):
            mems = mems or view.init_mems(len(batch.ids))
            with autocast(model.device, precision):
                out = view.loss(batch.to(model.device), mems=mems, execution=execution)
            mems = out.mems
            assert out.nll is not None
            nats += float(out.nll.double().sum())
            n_target += batch.n_scored
            on_tokens(batch.n_read)
    nats, total = world.sum(nats, n_target)
    share = n_step / stream.segments_per_epoch
    return Score(nats, round(total), round(total), None, time.perf_counter() - begin, share=share)


def filled_in(model: XLNet, batch: Batch, tokenizer: Tokenizer, *, precision: Precision, most: int) -> str:
    """Return what a model fills into a row's gaps, without memory: a line a target; `_` are tokens that it does not see.

    Args:
        model: put into evaluation mode and back.
        batch: its first row that is read forward is shown.
        tokenizer: of the model.
        precision: of matrix products.
        most: targets shown, in the order in which they are predicted.
    """
    row = int((~batch.pairs.backward).int().argmax())
    batch = batch.at(slice(row, row + 1))
    there, order = batch.to(model.device), batch.pairs.order
    pairs = there.pairs
    with scoring(model), autocast(model.device, precision):
        logits_KV = model(there.ids, order=pairs.order, segments=pairs.segments, is_backward=pairs.backward).logits[0]
    probability_KV = logits_KV.float().softmax(-1).cpu()
    (ids,), (labels,), (targets,) = batch.ids.tolist(), batch.labels.tolist(), order.targets.tolist()
    lines = []
    for k in [k for k in order.rank[0][order.targets[0]].argsort().tolist() if labels[k] >= 0][:most]:
        place, true, best = targets[k], labels[k], int(probability_KV[k].argmax())
        seen = (order.rank[0] < order.sees[0, place]).tolist()

        def shown(begin: int, end: int, seen: list[bool] = seen) -> str:
            places = range(max(begin, 0), min(end, len(ids)))
            return "".join(tokenizer.piece(ids[j]).decode(errors="replace") if seen[j] else "_" for j in places)

        guess = f"{_quoted(tokenizer, best)} {probability_KV[k, best]:.2f}"
        truth = "right" if best == true else f"it is {_quoted(tokenizer, true)} {probability_KV[k, true]:.2f}"
        line = f"{shown(place - _CONTEXT, place)} [{guess}, {truth}] {shown(place + 1, place + _CONTEXT // 2)}"
        lines.append(" ".join(line.split()))
    return "\n".join(lines)


def _quoted(tokenizer: Tokenizer, token_id: int) -> str:
    return repr(tokenizer.piece(token_id).decode(errors="replace"))
