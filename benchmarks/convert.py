"""How long it takes to convert a large checkpoint, and how much memory.

Writes random weights of the published large WikiText-103 model (285 million parameters, 267,735 words) as Hugging Face had
them, in each file format, and converts each with `txl convert` in a process of its own.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.harness import apart, command, facts, parse, run
from common.watch import run_watched

from transformer_xl.console import say

FORMATS = ("bin", "legacy bin", "safetensors")
TXL = "from transformer_xl.cli import main; main()"
IDLE = "import transformer_xl.cli, transformer_xl.conversion.convert"


def measure(form: str, options: argparse.Namespace) -> dict[str, float]:
    """Write a checkpoint, convert it, and return and print what that took."""
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        source, destination = Path(folder, "source"), Path(folder, "native")
        source.mkdir()
        say(f"writing a checkpoint ({form})")
        apart(write_checkpoint, source, form, options.tiny)
        idle = run_watched([sys.executable, "-c", IDLE], "importing the package")
        say(f"converting it ({form})")
        done = run_watched([sys.executable, "-c", TXL, "convert", str(source), str(destination), "--json"], "converting")
        assert json.loads(done.output)["tokenizer"] == "word"
        size = next(path.stat().st_size for path in source.iterdir() if path.name.startswith(("pytorch", "model"))) / 1e6
    found = {"size MB": size, "seconds": done.seconds, "MB/s": size / done.seconds, "peak MB": done.peak_mb}
    found |= {"above idle MB": done.peak_mb - idle.peak_mb, "peak / size": done.peak_mb / size}
    print("\n" + facts({"file": form, **{name: f"{value:,.2f}" for name, value in found.items()}}))
    return found


def write_checkpoint(folder: Path, form: str, tiny: bool) -> None:
    """Write what Hugging Face's save_pretrained would: config.json, weights under their names, and vocab.txt."""
    import torch
    from safetensors.torch import save_file

    from transformer_xl.config.model import TransformerXLConfig
    from transformer_xl.conversion.key_maps import huggingface

    values: dict[str, Any] = {"model_type": "transfo-xl"}  # and the defaults of their program
    if tiny:
        values |= {
            "vocab_size": 99,
            "cutoffs": [20, 50],
            "n_layer": 2,
            "d_model": 32,
            "d_embed": 32,
            "d_inner": 32,
            "n_head": 2,
        }
    config: TransformerXLConfig = huggingface.config_of(values)
    assert config.vocab_size is not None
    tensors = {}
    for part in huggingface.key_map(config).parts():
        tensors[part.name] = torch.randn(part.shape) * 0.02
        if form != "safetensors":  # tied weights have several names for one tensor there
            tensors |= dict.fromkeys(part.aliases, tensors[part.name])
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    (folder / "config.json").write_text(json.dumps(values))
    words = ["<eos>", "<unk>", *(f"word{i}" for i in range(config.vocab_size - 2))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=FORMATS, help="file formats (default: all)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see the benchmark run")
    parser.add_argument("--directory", type=Path, help="where the temporary directory is made; needs 4 GB")
    options = parse(parser)
    run(options, measure, options.format, model="tiny" if options.tiny else "wt103-large as Hugging Face has it")
