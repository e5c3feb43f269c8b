"""A law of loss: what parameters, tokens and memory were worth in small models, for `txl plan`.

    L(N, D, M) = E + A N^-α + B D^-β − C D^δ (1 − (1 + M / M_0)^-γ)

N counts the parameters of the layers, D the tokens read in training, M the positions of memory. Without memory the form is that
of Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3). Fitted by `benchmarks/law.py` to models of bytes of enwik8,
scored on 200,000 bytes of validation text.

Example:
    >>> ENWIK8.loss(500_000, 3e6, 64) < ENWIK8.loss(500_000, 3e6, 0)
    True
"""

from dataclasses import dataclass

from transformer_xl.config import RunConfig
from transformer_xl.model_config import TransformerXLConfig


@dataclass(frozen=True)
class Law:
    """A fitted law, with N in units of 300,000 parameters, and D of a million tokens."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    C: float
    delta: float
    M_0: float
    gamma: float

    def loss(self, parameters: float, tokens: float, memory: float) -> float:
        """Return nats per byte.

        Args:
            parameters: N.
            tokens: D.
            memory: M.
        """
        n, d = parameters / 3e5, tokens / 1e6
        worth = self.C * d**self.delta * (1 - (1 + memory / self.M_0) ** -self.gamma)
        return self.E + self.A * n**-self.alpha + self.B * d**-self.beta - worth


ENWIK8 = Law(E=1.5386, A=0.0732, alpha=0.8753, B=0.1869, beta=0.9524, C=0.0675, delta=0.1805, M_0=10.5655, gamma=1.9032)
ERROR = 0.014
"""Nats by which it is off, as a rule, for models that it was not fitted to."""
TRIED = 3_200_000
"""Tokens after which the longest of those models was looked at."""
_PARAMETERS, _TOKENS, _MEMORY = (60_000, 3_000_000), (800_000, 8 * TRIED), (0, 384)
"""Where it is used."""


@dataclass(frozen=True)
class Expected:
    """What the law says of a run, in nats per byte."""

    loss: float
    without_memory: float  # after as many tokens
    without_memory_in_as_much_time: float
    error: float  # of each of them, as a rule
    is_far: bool  # whether it reads more tokens than any model that the law was compared with


def expected(config: RunConfig, parameters: int, tokens: float | None, memory_share: float) -> Expected | None:
    """Return what the law says of a run; None: it is none of those that the law is about.

    Args:
        config: the run's.
        parameters: of the layers.
        tokens: that the run reads.
        memory_share: of the operations, which a model without memory would not do.
    """
    model = config.model
    if not isinstance(model, TransformerXLConfig) or model.mem_lens or model.same_length or tokens is None:
        return None
    family = (model.n_layer, len(model.ngram_rows), model.shift, config.train.tgt_len, config.optim.optimizer)
    if family != (3, 2, "averages", 64, "muon") or config.tokenizer.kind != "byte" or config.data.corpus != "enwik8":
        return None
    asked = ((parameters, _PARAMETERS), (tokens, _TOKENS), (model.mem_len, _MEMORY))
    if not all(least <= value <= most for value, (least, most) in asked):
        return None
    return Expected(
        loss=ENWIK8.loss(parameters, tokens, model.mem_len),
        without_memory=ENWIK8.loss(parameters, tokens, 0),
        without_memory_in_as_much_time=ENWIK8.loss(parameters, tokens / (1 - memory_share), 0),
        error=ERROR,
        is_far=tokens > TRIED,
    )
