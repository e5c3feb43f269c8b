"""Relative effective context length: how far back a group of models makes use of a text (Dai et al. 2019, sec. 4.4, app. C).

    l_i(c, t)             loss of model i on token t, given c tokens of context
    b_c(t)                min over i of l_i(c, t), the group's baseline
    T                     the share r of tokens with the largest b_c(t), the hardest ones for all
    f_i(c, c')            mean over T of min(b_c(t), l_i(c', t))
    g_i(c, c')            (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c), what the longer context gains
    RECL_i                the first c, going up in steps of Δ, from which g_i(c, c + Δ) is below a threshold (0.01)

f_i(c, c) is the mean of b_c over T for every i. All models of a group have the same baseline, so a worse model does not seem to
gain more only because there is more left to gain.

Tokens are scored in blocks of s, each read with the c tokens before it, from an empty memory. So the first token of a block has
a context of exactly c tokens and the last one of c + s - 1.

Shapes: N tokens that are scored.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from transformer_xl.checkpoint.open_run import Opened, open_run
from transformer_xl.errors import CorpusError
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.segments import blocks
from transformer_xl.reading.stream import open_stream, scoring
from transformer_xl.tools.ablation import Ablation

Losses = Callable[[int], np.ndarray]
"""Takes a context; returns nats (N,) of the same N tokens at every context."""

SHARES = (0.1, 0.5, 1.0)
"""The values of r that the paper reports."""

N_TOKEN, N_STEP, N_ROW = 10_000, 20, 32
"""Tokens that are scored, at most; steps of Δ to the longest context; blocks read side by side."""


def effective_lengths(
    losses: Mapping[str, Losses], *, share: float, delta: int, max_context: int, threshold: float = 0.01
) -> dict[str, int]:
    """Return the RECL of each model of a group; one of `max_context` says that the model still gained there.

    Args:
        losses: of each model, on the same tokens; asked for longer contexts as long as any model gains.
        share: r.
        delta: Δ, also the first context.
        max_context: the longest context, a multiple of Δ.
        threshold: the least gain.

    Example:
        >>> gains_until_20 = lambda context: np.full(4, 3.0 - min(context, 20) / 10)
        >>> effective_lengths({"a": gains_until_20}, share=1.0, delta=5, max_context=40)
        {'a': 20}
    """
    lengths, gaining = dict.fromkeys(losses, delta), list(losses)
    for context in range(delta, max_context, delta):
        baseline = np.minimum.reduce([own(context) for own in losses.values()]).astype(np.float64)
        hardest = np.argsort(-baseline, kind="stable")[: max(1, round(share * len(baseline)))]
        before = baseline[hardest]
        after = {name: np.minimum(before, losses[name](context + delta)[hardest]) for name in gaining}
        gaining = [name for name in gaining if -math.expm1((after[name] - before).mean()) >= threshold]
        lengths |= dict.fromkeys(gaining, context + delta)
        if not gaining:
            break
    return lengths


def ablation_lengths(
    ablation: Ablation, *, max_context: int, on_tokens: Callable[[int], object] = lambda n: None
) -> dict[str, dict[float, int]]:
    """Return RECL by variant and r, looked for in twenty steps; the variants are the group, with the first run of each.

    Args:
        ablation: whose finished runs are read, on the text that they were scored on.
        max_context: the longest context, a multiple of `N_STEP`.
        on_tokens: called with the number of tokens just scored.
    """
    done = {trial.variant.name: trial for trial in reversed(ablation.plan.trials) if (ablation.result(trial) or {}).get("done")}
    losses, delta = {}, max_context // N_STEP
    for variant in ablation.plan.variants:
        if trial := done.get(variant.name):
            opened = open_run(ablation.path_of(trial), device=variant.config.train.device)
            ids = opened.text(limit=ablation.plan.tokens).ids
            losses[variant.name] = losses_of(opened, ids, delta=delta, max_context=max_context, on_tokens=on_tokens)
    found = {r: effective_lengths(losses, share=r, delta=delta, max_context=max_context) for r in SHARES if losses}
    return {name: {r: lengths[name] for r, lengths in found.items()} for name in losses}


def losses_of(
    opened: Opened, ids: np.ndarray, *, delta: int, max_context: int, on_tokens: Callable[[int], object] = lambda n: None
) -> Losses:
    """Return the losses of a model on tokens spread over a text, integers (n,), as `txl eval` reads; each context is read once.

    A block is a fifth as long as Δ, and the first one begins after `max_context`.
    """
    size, reading = max(1, delta // 5), opened.reading()
    room = len(ids) - max_context
    if room < size:
        raise CorpusError(
            f"the text has {len(ids):,} tokens, and a context of {max_context:,} with {size:,} to score after it needs "
            f"{max_context + size:,}; give a longer text, or a smaller --recl"
        )
    n_block = min(max(1, N_TOKEN // size), room // size)
    starts = max_context + np.arange(n_block) * room // n_block
    segment = reading.tgt_len if reading.mem_len else reading.tgt_len + reading.ext_len
    model = replace(reading, ext_len=0).view(opened.model)

    @functools.cache
    def losses(context: int) -> np.ndarray:
        nats = context_losses(model, ids, starts, size=size, context=context, tgt_len=segment)
        on_tokens(len(nats))
        return nats

    return losses


def context_losses(
    model: LanguageModel, ids: np.ndarray, starts: np.ndarray, *, size: int, context: int, tgt_len: int
) -> np.ndarray:
    """Return nats (N,) of blocks of `size` tokens from `starts` on, each read from the `context` tokens before it.

    A model that reads one segment of at most `longest_segment` tokens reads no longer context than fits into it.
    """
    if longest := model.config.longest_segment:
        tgt_len, context = longest, min(context, longest - size + 1)
    nats = []
    with scoring(model):
        stream = open_stream(model.for_text(context + size), N_ROW, tgt_len=tgt_len)
        for first in range(0, len(starts), N_ROW):
            own = starts[first : first + N_ROW]
            stream.reset(torch.ones(N_ROW, dtype=torch.bool))
            parts = []
            for cut in blocks(ids, own, size=size, context=context, tgt_len=tgt_len):
                h_BTD = stream.read(cut.ids.to(model.device), rows=slice(len(own)))
                scored = cut.is_scored[0]
                parts.append(stream.nll(h_BTD[:, scored], cut.labels[:, scored].to(model.device)).float().cpu())
            nats.append(torch.cat(parts, dim=1).flatten())
    return torch.cat(nats).numpy()
