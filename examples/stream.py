"""Read a long text as one stream: the size of the memory and the time per token stay the same.

python examples/stream.py runs/quickstart some-long-text.txt
"""

import sys
import time
from pathlib import Path

import torch

import transformer_xl as txl


def main(run: str, file: str) -> None:
    model, tokenizer = txl.load(run)
    ids = torch.as_tensor(tokenizer.encode(Path(file).read_text(encoding="utf-8")))
    mems, begin, nats = model.init_mems(1), time.perf_counter(), 0.0
    with torch.no_grad():
        for at in range(0, len(ids) - 1, 128):
            inputs, labels = ids[at : at + 128][None], ids[at + 1 : at + 129][None]
            out = model(inputs[:, : labels.shape[1]], mems=mems, labels=labels)
            mems, nats = out.mems, nats + float(out.nll.sum())
            if at % (128 * 100) == 0:
                n_bytes = sum(h.element_size() * h.numel() for h in mems.hidden)
                read = at + labels.shape[1]
                speed = read / (time.perf_counter() - begin)
                print(
                    f"{read:9,} tokens read, {nats / read:.3f} nats per token, memory {n_bytes:,} bytes, {speed:,.0f} tokens/s"
                )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
