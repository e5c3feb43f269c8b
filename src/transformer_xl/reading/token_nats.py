"""The nats of every token of a text, in a file."""

import json
from pathlib import Path

import numpy as np

from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError


def write_token_nats(path: Path, ids: np.ndarray, nats: np.ndarray, tokenizer: Tokenizer) -> None:
    """Write an array where the name ends in .npy, else a line for each predicted token: position, id, nats, text in JSON.

    Args:
        path: of the file; an earlier one is replaced.
        ids: of the text, integers (N,).
        nats: of all tokens but the first, which nothing predicts, (N - 1,).
        tokenizer: of the text.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        if path.suffix == ".npy":
            np.save(path, nats)
            return
        texts: dict[int, str] = {}
        with path.open("w", encoding="utf-8") as file:
            file.write("position\tid\tnats\ttoken\n")
            pairs = zip(ids[1:].tolist(), nats.tolist(), strict=True)
            for position, (token, value) in enumerate(pairs, start=1):
                text = texts.setdefault(token, json.dumps(tokenizer.decode([token]), ensure_ascii=False))
                file.write(f"{position}\t{token}\t{value:.6f}\t{text}\n")
    except OSError as error:
        raise CheckpointError(f"cannot write '{path}': {error.strerror}; free disk space or choose another file") from None
