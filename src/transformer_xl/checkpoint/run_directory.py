"""The directory of a run, and loading a model and its tokenizer.

runs/quickstart/
config.json       every setting, resolved
tokenizer.json
seal.json         what these two must be; any change of them is found
checkpoints/      step-00001000/ …, best.json
environment.json  versions, commit, machine, seed and command of each start
loggers.json      the remote runs that it writes to, if any
metrics.jsonl     loss, validation, samples; one JSON object per line
*.damaged         what was damaged in a log, set aside
loss.png
.lock             held by the process that trains here
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_xl.checkpoint.store import CheckpointStore, averaged_weights
from transformer_xl.config import RunConfig
from transformer_xl.data.tokenizers import Tokenizer, load_tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, TxlError, beside, one_line, system_reason
from transformer_xl.files import locked, make_directories, remove, replace_file, stray_name
from transformer_xl.model.directory import CONFIG_FILE, RUNS, TOKENIZER_FILE, read_config, resolve
from transformer_xl.seals import differences, read_sealed, seal, seal_command, summary
from transformer_xl.untrusted import read_json_object

CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"
SEAL_FILE = "seal.json"


@dataclass(frozen=True)
class Seal:
    """What the files of a run must hold.

    Attributes:
        configs: contents that `config.json` may have: one, or while it is replaced the old and the new.
        tokenizer: fingerprint of the tokenizer.
    """

    configs: list[dict[str, Any]]
    tokenizer: str


class RunDirectory:
    """The files of one run; the directory need not exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def holds_run(self) -> bool:
        """True if a run has been started here."""
        return (self.path / CONFIG_FILE).is_file() and (self.path / CHECKPOINTS).is_dir()

    def store(self, *, keep: int = 2) -> CheckpointStore:
        """Return the run's checkpoints."""
        return CheckpointStore(self.path / CHECKPOINTS, keep=keep)

    @contextmanager
    def locked(self) -> Iterator[Callable[[], bool]]:
        """Keep other processes from training here until the block ends; make the directory, and remove it if it stays empty.

        The block gets a function that says whether the lock is still there.
        """

        def refuse() -> None:
            raise CheckpointError(f"another process is training in '{self.path}'; wait until it ends, or choose another --out")

        def remove_if_empty() -> None:
            with suppress(OSError):  # it is not empty
                self.path.rmdir()

        with ExitStack() as held:
            with writing(self.path):
                make_directories(self.path)
                held.callback(remove_if_empty)
                is_held = held.enter_context(locked(self.path / LOCK_FILE, on_busy=refuse))
            yield is_held

    def check_free(self) -> None:
        """Raise a `CheckpointError` unless the directory is free for a new run."""
        if self.path.exists() and not (self.path.is_dir() and self._is_free()):
            remedy = "continue it with --resume, or choose another --out" if self.holds_run else "choose another --out"
            raise CheckpointError(f"'{self.path}' {self._content()}; {remedy}")

    def create(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Write the files of a new run, all or none; call this while `locked`."""
        self.check_free()
        checkpoints = self.path / CHECKPOINTS
        with writing(self.path):
            try:
                checkpoints.mkdir(exist_ok=True)
                tokenizer.save(self.path / TOKENIZER_FILE)
                self.save_config(config, tokenizer)
            except BaseException:
                replaced = (self.path / SEAL_FILE, self.path / CONFIG_FILE)
                for path in (checkpoints, self.path / TOKENIZER_FILE, *replaced, *map(stray_name, replaced)):
                    with suppress(OSError):
                        remove(path)
                raise

    def write_missing(self, config: RunConfig, tokenizer: Tokenizer) -> list[str]:
        """Write those files again without which nobody can use the run, if they are gone; return their names."""
        names = (CONFIG_FILE, TOKENIZER_FILE, SEAL_FILE, CHECKPOINTS)
        missing = [name for name in names if not (self.path / name).exists()]
        with writing(self.path):
            if missing:
                make_directories(self.path / CHECKPOINTS)
            if TOKENIZER_FILE in missing:
                tokenizer.save(self.path / TOKENIZER_FILE)
        if CONFIG_FILE in missing or SEAL_FILE in missing:
            self.save_config(config, tokenizer)
        return missing

    def save_config(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Write the run's settings, and seal them and its tokenizer; a kill at any time leaves sealed settings, old or new."""
        new = config.model_dump(mode="json")
        try:
            old = self.read_seal().configs
        except CheckpointError:  # there is none yet
            old = []
        with writing(self.path):
            self._write_seal(Seal([*old, new], tokenizer.fingerprint))
            replace_file(self.path / CONFIG_FILE, (json.dumps(new, indent=2) + "\n").encode())
            self._write_seal(Seal([new], tokenizer.fingerprint))

    def read_seal(self) -> "Seal":
        """Read what the run's settings and tokenizer must be.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = self.path / SEAL_FILE
        remedy = f"if {CONFIG_FILE} and {TOKENIZER_FILE} are right, seal them again: {seal_command(self.path)}"
        try:
            match read_sealed(path):
                case {"configs": [*configs], "tokenizer": str(tokenizer)} if all(isinstance(each, dict) for each in configs):
                    return Seal(configs, tokenizer)
            raise ValueError("it says nothing of a run")
        except FileNotFoundError:
            raise CheckpointError(f"'{path}' is missing; {remedy}") from None
        except OSError as error:
            raise CheckpointError(f"'{path}' cannot be read: {error.strerror or error}; check the permissions") from None
        except ValueError as error:
            raise CheckpointError(f"'{path}' is damaged ({one_line(error)}); {remedy}") from None

    def _write_seal(self, content: "Seal") -> None:
        replace_file(self.path / SEAL_FILE, seal(vars(content)))

    def config(self) -> RunConfig:
        """Read the run's settings."""
        path = self.path / CONFIG_FILE
        if not path.exists():
            runs = beside(self.path, lambda path: RunDirectory(path).holds_run, also=RUNS)
            raise CheckpointError(f"'{self.path}' holds no run: {CONFIG_FILE} is missing; train one with txl train{runs}")
        values = read_json_object(path)
        known = [list(differences(sealed, values)) for sealed in self.read_seal().configs]
        if found := min(known, key=len, default=["no settings are sealed"]):
            raise CheckpointError(
                f"'{path}' is not as the run left it: {summary(found)}; restore it, or if you changed it on purpose: "
                f"{seal_command(self.path)}"
            )
        try:
            return RunConfig(**values)
        except ConfigError as error:
            raise CheckpointError(f"'{path}': {error}") from None

    def tokenizer(self, vocab_size: int | None = None) -> Tokenizer:
        """Read the run's tokenizer; see `load_tokenizer`."""
        path = self.path / TOKENIZER_FILE
        tokenizer = load_tokenizer(path, vocab_size=vocab_size or self.config().model.vocab_size)
        if tokenizer.fingerprint != self.read_seal().tokenizer:
            raise CheckpointError(
                f"'{path}' is another tokenizer than the run's; restore it, or if you changed it on purpose: "
                f"{seal_command(self.path)}"
            )
        return tokenizer

    def _is_free(self) -> bool:
        """Return whether the directory has no files but those that a killed start leaves: everything before config.json."""
        names = {path.name for path in self.path.iterdir()} - {LOCK_FILE}
        if CHECKPOINTS not in names:
            return not names
        own = (CHECKPOINTS, TOKENIZER_FILE, SEAL_FILE, stray_name(self.path / CONFIG_FILE).name)
        return all(name.startswith(own) for name in names) and not any((self.path / CHECKPOINTS).iterdir())

    def _content(self) -> str:
        if not self.path.is_dir():
            return "is a file"
        if not self.holds_run:
            return "is not empty and holds no run"
        try:
            steps = self.store().steps()
            return f"holds another run ('{self.config().name}', {f'step {steps[-1]:,}' if steps else 'no checkpoint yet'})"
        except TxlError:
            return "holds another run"


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn an `OSError` into one line that says why the directory cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write to '{directory}': {system_reason(error, 'choose another --out')}") from None


def short_names(sources: Sequence[str | Path]) -> list[str]:
    """Return names for several runs: those of their directories, or whole paths if two directories have the same name.

    Example:
        >>> short_names(["runs/a", "runs/b"]), short_names(["old/a", "new/a", "new/b"])
        (['a', 'b'], ['old/a', 'new/a', 'new/b'])
    """
    names = [os.path.basename(os.path.realpath(source)) for source in sources]  # noqa: PTH119 - unlike Path, it ignores loops
    return names if len(set(names)) == len(names) else [str(source) for source in sources]


def load(
    source: str | Path,
    *,
    which: Literal["best", "last", "average"] = "best",
    on_damaged: Callable[[str], None] | None = None,
) -> tuple[Any, Tokenizer]:
    """Load a model and its tokenizer from a run, an exported directory or a hub id.

    Args:
        source: a run directory, a directory written by `save_pretrained` that also has the tokenizer, or a hub id.
        which: for a run: the weights with the best validation loss, plain or averaged; the last ones; or the last average
            (`train.average`).
        on_damaged: called with a one-line message for each damaged checkpoint that is skipped; None: `warnings.warn`.

    Returns:
        The model in evaluation mode, a `LanguageModel` or an `XLNet`, and the tokenizer.

    Raises:
        CheckpointError: there is nothing, everything is damaged, parts do not fit together, or weights are not finite numbers.
    """
    from transformer_xl.model.adapters import merged
    from transformer_xl.model.pretrained import build, open_model
    from transformer_xl.model.sequence_model import make_model

    run = RunDirectory(source)
    if run.holds_run:
        config, train = run.config().model, run.config().train
        tokenizer = run.tokenizer(config.vocab_size)
        check_tokenizer(tokenizer, config.vocab_size, str(source))
        weights = _run_weights(run, which, on_damaged or _warn)
        if train.lora_rank is not None:
            weights = merged(weights, scale=train.lora_alpha / train.lora_rank)
        return build(make_model, config, weights, f"{run.path / CHECKPOINTS}"), tokenizer
    folder = resolve(source)
    config = read_config(folder / CONFIG_FILE)
    if not (folder / TOKENIZER_FILE).exists():
        raise CheckpointError(
            f"'{folder}' has no {TOKENIZER_FILE}; save the tokenizer there, convert again with --vocabulary FILE, or load "
            "the model alone, with from_pretrained of its class"
        )
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE, vocab_size=config.vocab_size)
    check_tokenizer(tokenizer, config.vocab_size, str(source))
    return open_model(make_model, config, folder), tokenizer


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int | None, origin: str) -> None:
    """Refuse a tokenizer whose vocabulary is not the model's."""
    if tokenizer.vocab_size != vocab_size:
        raise CheckpointError(
            f"the {TOKENIZER_FILE} of '{origin}' has {tokenizer.vocab_size} tokens, its {CONFIG_FILE} {vocab_size}; "
            "they do not belong together, restore those that the model was trained with"
        )


def _run_weights(run: RunDirectory, which: str, on_damaged: Callable[[str], None]) -> dict[str, Any]:
    store = run.store()
    checkpoint = (store.load_best if which == "best" else store.load_newest)(on_damaged=on_damaged)
    averaged = which == "average"
    if which == "best":  # its average may be what makes it the best
        match checkpoint.state:
            case {"record": {"best": {"step": step, "average": True}}}:
                averaged = step == checkpoint.step
    if averaged and not averaged_weights(checkpoint):
        raise CheckpointError(
            f"checkpoint {checkpoint.step} of '{run.path}' holds no averaged weights; load its best or last ones, or train "
            "with train.average=ema, or swa, which begins at train.average_start"
        )
    return averaged_weights(checkpoint) if averaged else checkpoint.model


def _warn(message: str) -> None:
    import warnings

    warnings.warn(message, stacklevel=3)
