"""Bytes that processes send each other in a step, in rings: each sends (n - 1)/n of what is gathered or summed.

A ring enters and leaves every machine once, so what leaves a machine is what one of its processes sends.
"""

from dataclasses import dataclass
from typing import Literal

Division = Literal["ddp", "fsdp"]
"""ddp: every process has all weights. fsdp: each has its share of weights, gradients and optimizer (FSDP2, full sharding)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends in a step."""

    reduced: float = 0.0  # gradients that are summed over all processes
    gathered: float = 0.0  # weights that are collected for the forward and for the backward pass of each group of lanes

    @property
    def total(self) -> float:
        """All of it."""
        return self.reduced + self.gathered


def count_traffic(n_parameter: int, *, n_process: int, division: Division, n_pass: int) -> Traffic:
    """Count what a process sends in a step; weights and gradients travel in fp32.

    Args:
        n_parameter: of the model.
        n_process: number of processes.
        division: what each of them holds.
        n_pass: forward and backward passes of a step. DDP sums gradients after the last one, FSDP after each.
    """
    ring = (n_process - 1) / n_process * 4 * n_parameter
    if division == "ddp":
        return Traffic(reduced=2 * ring)
    return Traffic(reduced=n_pass * ring, gathered=2 * n_pass * ring)
