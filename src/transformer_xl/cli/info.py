"""`txl info`: what a run or an exported model is, from JSON files and the header of its weights; PyTorch is not imported."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.checkpoint.steps import finished_steps, readable_path
from transformer_xl.cli.options import Imports, Json, import_kinds
from transformer_xl.console import clock, in_bytes, printable, table
from transformer_xl.errors import CheckpointError, ConfigError, message_of, one_line
from transformer_xl.manifest import MANIFEST_FILE, read_manifest
from transformer_xl.training.entries import read_metrics
from transformer_xl.untrusted import open_regular, read_json, read_json_object

if TYPE_CHECKING:
    from transformer_xl.config.model import ModelConfig
    from transformer_xl.config.run import RunConfig

_CONFIG, _TOKENIZER, _WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
_ADAPTER = ".parametrizations.weight.0."  # in the names of LoRA's weights, which become part of the others when loaded
_MOST_LABELS = 12
_BUDGETS = {"max_steps": "steps", "max_tokens": "tokens", "max_epochs": "epochs", "max_minutes": "minutes"}
_PLACE = {"kind", "tokens", "seconds"}  # of an entry of metrics.jsonl, where it is no score


def info(run: str, /, *, json_: Json = False, import_: Imports = None) -> None:
    """Say what a run or a model is: sizes, text, steps, scores, checkpoints.

    No weights are read, so it is quick for a large model, too, and may look at
    a run that is being trained. It compares the sizes of files with what was
    written; only loading a checkpoint compares every byte.

    Common uses:
        txl info runs/mine
        txl info models/wt103
        txl info runs/mine --json | jq .best.loss

    Args:
        run: directory of a run, finished or not, or of an exported model; or a hub id.
        json_: print one JSON object.
        import_: a module that registers your own kind of model: its name, or PATH/NAME.py; may be repeated.
    """
    import_kinds(import_)
    folder = Path(run)
    is_run = (folder / _CONFIG).is_file() and (folder / "checkpoints").is_dir()
    facts = {"source": run, "is_run": is_run, **(_of_run(folder) if is_run else _of_model(run))}
    print(json.dumps(facts) if json_ else printable(_in_words(facts)))


def _of_model(source: str) -> dict[str, Any]:
    from transformer_xl.config.model import read_config, read_segment

    folder = Path(source)
    if not (folder / _CONFIG).is_file():  # a hub id, or a mistake
        from transformer_xl.config.recipes import recipe_names
        from transformer_xl.model.pretrained import resolve

        if source in recipe_names():
            raise ConfigError(f"'{source}' is a recipe, and no run or model: txl settings {source}")
        folder = resolve(source)
    config, tokenizer = read_config(folder / _CONFIG), folder / _TOKENIZER
    kind = read_json_object(tokenizer).get("kind") if tokenizer.is_file() else None
    segment = read_segment(folder / _CONFIG)
    return {**_model(config, folder / _WEIGHTS), **({"tgt_len": segment} if segment else {}), "tokenizer": kind}


def _of_run(folder: Path) -> dict[str, Any]:
    checkpoints = list(_checkpoints(folder / "checkpoints"))
    sound = [facts for facts in checkpoints if facts["damage"] is None]
    newest = Path(sound[-1]["path"]) if sound else None
    config = _settings(folder, newest)
    entries = read_metrics(folder)
    scored = [entry for entry in entries if entry["kind"] == "valid"]
    best, train, task = _best_step(folder), config.train, config.task
    of_best = [entry for entry in scored if entry["step"] == best]
    last = entries[-1] if entries else {}
    saved = {"step": sound[-1]["step"], **read_json_object(newest / "state.json")} if newest else {}
    latest = max(last, saved, key=lambda facts: facts.get("step", 0))  # steps, tokens and seconds of one moment
    state = "finished" if last.get("kind") == "final" else "not finished"
    return {
        "recipe": config.name,
        "state": "being trained" if _is_locked(folder) else state,
        **_model(config.model, newest and newest / _WEIGHTS),
        "tgt_len": train.tgt_len,
        "tokenizer": config.tokenizer.kind,
        "corpus": task.data if task else config.data.corpus,
        "base": task.base if task else config.base,
        "steps": latest.get("step", 0),
        "tokens": latest.get("tokens", 0),
        "minutes": latest.get("seconds", 0) / 60,
        "epochs": newest and saved.get("stream", {}).get("epoch"),
        "budget": {name: limit for name in _BUDGETS if (limit := getattr(train, name)) is not None},
        "predicts": config.predicts,
        "counts": "id" if config.tokenizer.kind == "ids" else "character",
        "best": _score(of_best),
        "last": _score(scored),
        "precision": train.precision,
        "lora_rank": train.lora_rank,
        "trained_with": _environment(folder),
        "checkpoints": [{**facts, "best": facts["step"] == best} for facts in checkpoints],
    }


def _settings(folder: Path, checkpoint: Path | None) -> "RunConfig":
    """Return a run's settings as its newest sound checkpoint has them; those of version 0.2 have none."""
    from transformer_xl.config.run import RunConfig

    path = folder / _CONFIG if checkpoint is None or not (checkpoint / _CONFIG).is_file() else checkpoint / _CONFIG
    try:
        return RunConfig(**read_json_object(path))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"'{path}': {one_line(error)}") from None


def _model(config: "ModelConfig", weights: Path | None) -> dict[str, Any]:
    """Return kind, sizes and task of a model, and its number of parameters where there are weights."""
    names = ("n_layer", "d_model", "n_head", "mem_len", "vocab_size")
    sizes = {name: getattr(config, name) for name in names if hasattr(config, name)}
    head = config.head and {"kind": config.head.kind, "labels": list(config.head.labels)}
    return {"kind": config.kind, **sizes, "head": head, **(_weights(weights) if weights else {"parameters": None})}


def _weights(path: Path) -> dict[str, Any]:
    """Return the number of parameters and their type, as the header of a safetensors file has them."""
    from safetensors import SafetensorError, safe_open

    file, size = open_regular(path)
    file.close()
    try:
        weights = safe_open(path, framework="np", backend="pread")
        tensors = [weights.get_slice(name) for name in weights.keys() if _ADAPTER not in name]  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        reason = ascii(one_line(error).removeprefix("Error while deserializing header: ")[:150])[1:-1]
        raise CheckpointError(f"'{path}' is no sound safetensors file ({reason}); copy or download it again") from None
    types = ", ".join(sorted({tensor.get_dtype() for tensor in tensors}))
    return {"parameters": sum(math.prod(tensor.get_shape()) for tensor in tensors), "dtype": types, "weights_bytes": size}


def _checkpoints(folder: Path) -> Iterator[dict[str, Any]]:
    for step in finished_steps(folder):
        path = readable_path(folder, step)
        with suppress(FileNotFoundError):  # a training has deleted it meanwhile
            saved = datetime.fromtimestamp(path.stat().st_mtime, UTC).astimezone().isoformat(timespec="seconds")
            size = sum(file.stat().st_size for file in path.iterdir())
            yield {"step": step, "path": str(path), "saved": saved, "bytes": size, "damage": _damage(path)}


def _damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, as far as the names and sizes of its files tell."""
    try:
        manifest = read_manifest(checkpoint / MANIFEST_FILE, needs=(_WEIGHTS, "state.json"), remedy="")
        for name, record in manifest.files.items():
            size = (checkpoint / name).stat().st_size
            if size != record.size:
                return f"{name} has {size:,} bytes, and {record.size:,} were written"
        for name in manifest.files.keys() & {_CONFIG, "state.json"}:
            manifest.read(checkpoint / name)
    except (CheckpointError, OSError) as error:
        return one_line(message_of(error)).removesuffix(";")
    return None


def _best_step(folder: Path) -> int | None:
    with suppress(CheckpointError, FileNotFoundError):
        return read_json_object(folder / "checkpoints" / "best.json").get("step")
    return None


def _is_locked(folder: Path) -> bool:
    """Return whether a process trains here."""
    from filelock import FileLock, Timeout

    path = folder / ".lock"
    if not path.is_file():
        return False
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:  # nobody may write here
        return False
    lock.release()
    return False


def _score(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the scores of the last entry."""
    return {name: value for name, value in entries[-1].items() if name not in _PLACE} if entries else None


def _environment(folder: Path) -> dict[str, Any] | None:
    """Return the software and the device of the last start; None: nobody knows."""
    with suppress(CheckpointError, FileNotFoundError, LookupError, TypeError, AttributeError):
        last = read_json(folder / "environment.json")[-1]
        return {**last["versions"], "device": last["machine"].get("gpu") or last["machine"]["device"]}
    return None


def _in_words(facts: dict[str, Any]) -> str:
    rows = [
        ["model", _model_in_words(facts)],
        ["vocabulary", f"{facts['vocab_size'] or 0:,} ({facts['tokenizer'] or 'no file'})"],
    ]
    if head := facts["head"]:
        labels, more = head["labels"], max(0, len(head["labels"]) - _MOST_LABELS)
        named = f" ({', '.join(labels[:_MOST_LABELS])}{f' and {more:,} more' * bool(more)})" if labels else ""
        rows.append(["task", head["kind"] + named])
    if not facts["is_run"]:
        return table([["source", f"{facts['source']}, an exported model"], *rows], n_left=2)
    rows += [["text", facts["corpus"]], ["base", facts["base"]], ["training", _progress(facts)]]
    rows += [[f"{name} score", _score_in_words(facts, facts[name])] for name in ("best", "last") if facts[name]]
    rows.append(["precision", facts["precision"] + (f", LoRA of rank {facts['lora_rank']}" if facts["lora_rank"] else "")])
    rows.append(["software", ", ".join(f"{name} {version}" for name, version in (facts["trained_with"] or {}).items())])
    head_row = ["source", f"{facts['source']}, a run of the recipe {facts['recipe']}, {facts['state']}"]
    checkpoints = [
        [f"{at['step']:,}", at["saved"][:16].replace("T", " "), in_bytes(at["bytes"]), at["damage"] or "best" * at["best"]]
        for at in facts["checkpoints"]
    ]
    saved = table([["checkpoint", "saved", "size", ""], *checkpoints], n_left=0) if checkpoints else "no checkpoint yet"
    return table([head_row, *(row for row in rows if row[1])], n_left=2) + f"\n\n{saved}"


def _model_in_words(facts: dict[str, Any]) -> str:
    n = facts["parameters"]
    size = "" if n is None else f"{n:,} parameters ({facts['dtype']}), "  # only a checkpoint tells
    heads = f", heads {facts['n_head']}" if "n_head" in facts else ""
    segment = f", segments of {facts['tgt_len']:,}" if "tgt_len" in facts else ""
    sizes = f"layers {facts['n_layer']}, width {facts['d_model']:,}{heads}, memory {facts['mem_len']:,}{segment}"
    return f"{facts['kind']}, {size}{sizes}"


def _progress(facts: dict[str, Any]) -> str:
    """Return how much of each budget is used."""

    def of(name: str) -> str:
        limit = facts["budget"].get(name)
        return "" if limit is None else f" of {limit:,}".removesuffix(".0")

    epochs = f", {facts['epochs'] or 0}{of('max_epochs')} epochs" if of("max_epochs") else ""
    minutes = f"{of('max_minutes')} minutes" if of("max_minutes") else ""
    steps = f"{facts['steps']:,}{of('max_steps')} steps, {facts['tokens']:,}{of('max_tokens')} tokens{epochs}"
    return f"{steps} in {clock(60 * facts['minutes'])}{minutes}"


def _score_in_words(facts: dict[str, Any], score: dict[str, Any]) -> str:
    figures = {name: value for name, value in score.items() if name not in ("step", "loss", "bpc") and value is not None}
    if facts["head"]:
        from transformer_xl.tasks.metrics import metrics_in_words

        words = metrics_in_words(figures)
    else:
        words = f"{score['loss']:.4f} nats per {facts['predicts']}" if score["loss"] is not None else "not finite"
        words += f", {score['bpc']:.3f} bits per {facts['counts']}" if score.get("bpc") is not None else ""
        words += f"; averaged weights {figures['average_loss']:.4f}" if "average_loss" in figures else ""
    return f"{words} (step {score['step']:,})"
