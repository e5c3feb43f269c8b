"""What `prepare_memory.py` watches: `prepare_child.py KIND TEXT CACHE` prepares a text and prints seconds and tokens as JSON.

A file of its own, for worker processes import the main file of their parent: this one is as light as the `txl` command.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(kind: Any, text: str, cache: str) -> None:
    from transformer_xl.config.run import DataConfig, TokenizerConfig
    from transformer_xl.data.prepare import prepare

    begin = time.perf_counter()
    prepared = prepare(DataConfig(corpus=text), TokenizerConfig(kind=kind), cache=Path(cache), progress=False)
    print(json.dumps([time.perf_counter() - begin, len(prepared.splits["train"].ids)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
