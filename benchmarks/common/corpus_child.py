"""What `corpus.py` watches: `corpus_child.py prepare|stream KIND TEXT CACHE [SHUFFLE]` prints its figures as JSON.

A file of its own, for worker processes import the main file of their parent: this one is as light as the `txl` command.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

BATCH_SIZE, TGT_LEN = 32, 512
STEPS_PER_LOOK = 50


def main(action: str, kind: Any, text: str, cache: str, shuffle: str = "none") -> None:
    from transformer_xl.config.run import DataConfig, TokenizerConfig
    from transformer_xl.data.prepare import prepare

    begin = time.perf_counter()
    documents = "lines" if Path(text).is_dir() else "files"
    data = DataConfig.model_validate({"corpus": text, "documents": documents, "shuffle": shuffle})
    prepared = prepare(data, TokenizerConfig(kind=kind), cache=Path(cache), progress=False)
    train = prepared.splits["train"]
    found = {"seconds": time.perf_counter() - begin, "tokens": len(train.ids), "mb": train.n_bytes / 1e6}
    print(json.dumps(found | (stream(train, data.shuffle) if action == "stream" else {})))


def stream(train: Any, shuffle: Any) -> dict[str, float]:
    """Read an epoch; return the seconds of it and of its first segment, and memory at its beginning and at most."""
    from transformer_xl.data.streams import SegmentStream

    begin = time.perf_counter()
    given = {"document_starts": train.document_starts, "shuffle": shuffle}
    segments = SegmentStream(train.ids, batch_size=BATCH_SIZE, tgt_len=TGT_LEN, **given)
    next(segments)
    first, peaks = time.perf_counter() - begin, [anonymous_mb()]
    while segments.epoch == 0:
        next(segments)
        if segments.position % STEPS_PER_LOOK == 0:
            peaks.append(anonymous_mb())
    return {"seconds": time.perf_counter() - begin, "first": first, "start_mb": peaks[0], "peak_mb": max(peaks)}


def anonymous_mb() -> float:
    """Return the memory (MB) that this process cannot give back, without files that it has mapped; 0 except on Linux."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e6


if __name__ == "__main__":
    main(*sys.argv[1:])
