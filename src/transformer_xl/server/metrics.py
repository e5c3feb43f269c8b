"""Counts for Prometheus, and one line of JSON per request. Neither ever holds text, tokens, keys or whole ids."""

import json
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """All counts of one server."""

    def __init__(self, *, log: TextIO | None = None) -> None:
        self.registry, self._log = CollectorRegistry(), log
        own: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("txl_requests", "requests that were answered", ["route", "status"], **own)
        self._seconds = Histogram("txl_request_seconds", "from request to the end of its answer", buckets=_SECONDS, **own)
        self.first = Histogram("txl_time_to_first_token_seconds", "from request to first token", buckets=_SECONDS, **own)
        self.between = Histogram("txl_inter_token_seconds", "between two tokens of a text", buckets=_SECONDS, **own)
        self._tick = Histogram("txl_tick_seconds", "a turn of the engine", ["with_piece"], buckets=_SECONDS, **own)
        self._read = Counter("txl_tokens_read", "tokens read", **own)
        self.kept = Counter("txl_tokens_kept", "tokens of prompts that an earlier one had read already", **own)
        self._written = Counter("txl_tokens_written", "tokens written", **own)
        self.evictions = Counter("txl_evictions", "sessions that left a row or memory", ["to"], **own)
        self.restores = Histogram("txl_restore_seconds", "to read a session from its file", buckets=_SECONDS, **own)
        self.cancelled = Counter("txl_cancelled", "jobs that were cancelled", ["by"], **own)
        self._nats = Counter("txl_nats", "negative log-likelihood of tokens that were scored", **own)
        self._scored = Counter("txl_scored_tokens", "tokens that were scored", **own)
        self.queue = Gauge("txl_queue_requests", "jobs that wait for a row", **own)
        self.rows_busy = Gauge("txl_rows_busy", "rows that read or write", **own)
        self.rows = Gauge("txl_rows", "rows of the decoder", **own)
        self.sessions = Gauge("txl_sessions", "sessions in this process", ["state"], **own)
        self.session_bytes = Gauge("txl_session_bytes", "bytes that a session takes, however much it has read", **own)

    def ticked(self, seconds: float, *, n_read: int, n_written: int) -> None:
        """Count a turn of the engine."""
        self._tick.labels(str(bool(n_read)).lower()).observe(seconds)
        self._read.inc(n_read)
        self._written.inc(n_written)

    def scored(self, nats: float, n: int) -> None:
        """Count tokens that were scored."""
        self._nats.inc(max(0.0, nats))
        self._scored.inc(n)

    def answered(self, route: str, status: int, seconds: float, **more: object) -> None:
        """Count a request, and write its line."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.observe(seconds)
        if self._log:
            line = {"route": route, "status": status, "seconds": round(seconds, 4), **more}
            print(json.dumps(line), file=self._log, flush=True)

    def text(self) -> bytes:
        """Return all counts in the format of Prometheus."""
        return generate_latest(self.registry)
