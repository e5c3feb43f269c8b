"""What `large_corpus.py` watches: `large_corpus_child.py prepare|stream KIND TEXT CACHE SHUFFLE` prints its figures as JSON.

A file of its own, for worker processes import the main file of their parent: this one is as light as the `txl` command.
"""

import json
import sys
import time
from pathlib import Path

BATCH_SIZE, TGT_LEN = 32, 512
STEPS_PER_LOOK = 50


def main(action: str, kind: str, text: str, cache: str, shuffle: str) -> None:
    from transformer_xl.config.run import DataConfig, TokenizerConfig
    from transformer_xl.data.prepare import prepare
    from transformer_xl.data.streams import SegmentStream

    begin = time.perf_counter()
    data = DataConfig.model_validate({"corpus": text, "documents": "lines", "shuffle": shuffle})
    prepared = prepare(data, TokenizerConfig.model_validate({"kind": kind}), cache=Path(cache), progress=False)
    train = prepared.splits["train"]
    found = {"seconds": time.perf_counter() - begin, "tokens": len(train.ids), "documents": len(train.document_starts)}
    if action == "stream":
        begin = time.perf_counter()
        stream = SegmentStream(
            train.ids,
            batch_size=BATCH_SIZE,
            tgt_len=TGT_LEN,
            document_starts=train.document_starts,
            shuffle=data.shuffle,
        )
        next(stream)
        first = time.perf_counter() - begin
        peaks = [anonymous_mb()]
        while stream.epoch == 0:
            next(stream)
            if stream.position % STEPS_PER_LOOK == 0:
                peaks.append(anonymous_mb())
        seconds = time.perf_counter() - begin
        found |= {"seconds": seconds, "first": first, "mb": train.n_bytes / 1e6, "start_mb": peaks[0], "peak_mb": max(peaks)}
    print(json.dumps(found))


def anonymous_mb() -> float:
    """Return the memory (MB) that this process cannot give back, without files that it has mapped; 0 except on Linux."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e6


if __name__ == "__main__":
    main(*sys.argv[1:])
