"""`txl hidden`."""

import json
from pathlib import Path

from transformer_xl.cli.options import Flag, Json, Opening, check_least, check_run
from transformer_xl.console import in_bytes, progress
from transformer_xl.data.text_files import check_readable
from transformer_xl.errors import ConfigError
from transformer_xl.files import check_file


def hidden(
    run: Path,
    file: Path,
    out: Path,
    /,
    *,
    layer: int | None = None,
    tgt_len: int | None = None,
    mem_len: int | None = None,
    opening: Opening = Opening(),
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Write a model's hidden state for each token of a text to a NumPy array, to probe what it knows.

    The text is read as one stream, with memory, in fp32. Row i of the array is
    the hidden state after token i. txl score --per token has a row for the same
    tokens.

    Common uses:
        txl hidden runs/mine essay.txt states.npy
        txl hidden runs/mine essay.txt states.npy --layer 2
        txl hidden runs/mine essay.txt states.npy --mem-len 0

    Args:
        run: directory of a run or of an exported model.
        file: text file, plain or compressed; of a model of ids, a file of ids.
        out: where the array goes, float32 (tokens, width).
        layer: 0 is the embeddings, 1 the output of the first layer, and so on. Default: the last, which the softmax reads.
        tgt_len: tokens per segment. Default: as txl eval reads.
        mem_len: positions of memory. Default: as txl eval reads.
        opening: how the run is opened.
        quiet: show no progress, only errors.
        json_: print one JSON object.
    """
    check_least({"layer": (layer, 0), "tgt-len": (tgt_len, 1), "mem-len": (mem_len, 0)})
    if out.suffix != ".npy":
        raise ConfigError(f"'{out}' must end in .npy, because it becomes an array of NumPy")
    check_run(run)
    check_readable(file)
    check_file(out, option="out")
    if out.exists() and out.samefile(file):
        raise ConfigError(f"'{out}' is the file itself; choose another place for the array")
    from transformer_xl.reading.hidden import write_hidden_states

    opened = opening.open(run)
    reading = opened.reading(tgt_len=tgt_len, mem_len=mem_len, batch_size=1)
    ids = opened.text(file=file).ids
    with progress("reading", len(ids), hidden=quiet) as bar:
        shape = write_hidden_states(out, opened.model, ids, reading, layer=layer, on_tokens=bar.advance)
    which = "embeddings" if layer == 0 else f"layer {layer or len(opened.model.layers)}"
    if json_:
        print(json.dumps({"run": str(run), "file": str(file), "out": str(out), "layer": layer, "shape": shape}))
    else:
        print(f"{which} of {shape[0]:,} tokens, width {shape[1]:,}: '{out}' ({in_bytes(out.stat().st_size)})")
