"""`txl train` and `txl finetune`."""

import errno
import glob
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from transformer_xl.cli.options import RECIPES, TASKS, Flag, Imports, Json, Natural, Overrides, Repeated, import_kinds
from transformer_xl.console import printable
from transformer_xl.errors import ConfigError, did_you_mean, nearest
from transformer_xl.process import is_reporter

if TYPE_CHECKING:
    from transformer_xl.training.display import Display


def train(
    recipe: Annotated[str | None, RECIPES] = None,
    /,
    *,
    corpus: str | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    grow: Flag = False,
    out: Path | None = None,
    set_: Overrides = None,
    resume: Flag = False,
    quiet: Flag = False,
    logger: Repeated = None,
    compatible: Flag = False,
    import_: Imports = None,
    dry_run: Flag = False,
) -> None:
    """Train a model on text, then score it and generate a sample.

    Ctrl-C finishes the step, saves, and says how to resume. So do SIGTERM, a
    closed terminal, and a pipe whose reader has gone.

    Common uses:
        txl train                                # on Python's standard library
        txl train my.txt                         # on a file, directory, "*.txt"
        txl train wt2-small --corpus my.txt      # another recipe on a text
        txl train shakespeare-char --corpus DIR  # its own text, found in DIR
        txl train --set train.max_minutes=10     # with other settings
        txl train new.txt --from runs/mine       # start from its weights
        txl train new.txt --from runs/mine --grow  # and add characters
        txl train --resume --out runs/mine       # resume a stopped run
        txl train wt103-base --dry-run           # what it needs; trains nothing

    With eight processes (docs/scaling.md):
        torchrun --nproc-per-node 8 -m transformer_xl train wt103-base

    Args:
        recipe: a recipe's name (txl recipes) or TOML file; or a text, on which quickstart is trained. Default: quickstart.
        corpus: name, file, directory or glob; or the directory that contains the recipe's named corpus.
        from_: start from the weights of this run, exported directory or hub id. A run also replaces the recipe.
        grow: add characters or words that the vocabulary of --from lacks; not if it has model.ngram_rows, as of quickstart.
        out: directory of the run. Default: runs/RECIPE, or runs/TEXT if a text replaces the recipe.
        set_: section.key=value, overrides the recipe; may be repeated. txl settings lists them.
        resume: resume the run in --out, or start it if there is none. Without recipe and corpus, --out must be a run.
        quiet: show warnings only.
        logger: tensorboard or wandb, besides metrics.jsonl; may be repeated. Default: tensorboard if it is installed.
        compatible: train a model that can be exported to Hugging Face's and the authors' programs (txl convert --to).
        import_: a module that registers your own kinds: its name, or PATH/NAME.py; may be repeated.
        dry_run: print parameters, memory, operations and time on this machine; write nothing.
    """
    import_kinds(import_)
    if dry_run and not is_reporter():
        return
    another = None
    if recipe is not None and _is_text(recipe):
        if corpus is not None:
            raise ConfigError(f"'{recipe}' is a text, and --corpus names another, '{corpus}'; give one")
        recipe, corpus, out = None if from_ else "quickstart", recipe, out or Path("runs") / _name_of_text(recipe)
        another = f"txl train RECIPE --corpus {shlex.quote(corpus)} takes another" if recipe else None
    if from_ and compatible:
        raise ConfigError(
            f"--compatible is for a new model, and --from takes that of '{from_}' as it is; leave one of them out"
        )
    overrides = [*(_compatible(recipe, set_ or []) if compatible else ()), *(set_ or [])]
    if dry_run:
        _dry_run(recipe, corpus, from_, out if resume else None, overrides, grow=grow)
        return
    from transformer_xl.training.run import train as train_model

    display = _display(quiet)
    if another:
        from transformer_xl.config.recipes import load_recipe

        load_recipe("quickstart", overrides)  # a mistake there is the only line
        display.say(f"training on {corpus} with the recipe {recipe}; {another}")
    outcome = train_model(
        recipe,
        out=out,
        overrides=overrides,
        corpus=corpus,
        base=from_,
        grow=grow,
        resume=resume,
        loggers=logger or [],
        display=display,
    )
    if outcome.stopped_by:
        sys.exit(128 + outcome.stopped_by)
    if outcome.picture:
        display.say(f"loss curve: {outcome.picture}")
    where = shlex.quote(str(outcome.directory))
    writes = "" if outcome.predicts == "target" else f"    txl generate {where} --prompt TEXT"
    display.say(f"next: txl eval {where}{writes or ' --compare-memory'}")


def finetune(
    run: str | None = None,
    /,
    *,
    task: Annotated[str | None, TASKS] = None,
    data: str | None = None,
    out: Path | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: Repeated = None,
    document: str | None = None,
    set_: Overrides = None,
    seed: Natural | None = None,
    resume: Flag = False,
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Fine-tune a model for a task: classes, numbers, answers, labels of words, ...

    It validates during training, keeps the best weights, stops when nothing
    improves, and draws confusions. Ctrl-C saves and says how to resume.

    Common uses:
        txl finetune runs/xlnet --task classification --data reviews.tsv
        txl finetune runs/xlnet --task sst2 --data DIR --out runs/sst2
        txl finetune runs/xlnet --task regression --data pairs.tsv --label score
        txl finetune models/xlnet-base --task squad2 --data DIR
        txl finetune runs/xlnet --task token-classification --data DIR
        txl finetune --resume --out runs/sst2  # resume

    Args:
        run: a run, an exported directory or a hub id. Left out with --resume.
        task: classification, multilabel, regression, choice, squad, token-classification; others, such as mnli; or a TOML file.
        data: a file (TSV, CSV, JSONL, SQuAD, CoNLL), or a directory with train, dev and test files or with one per class.
        out: directory of the new run. Default: runs/TASK.
        text: column of the text, or of words. Default: found by its name.
        pair: column of the second text. Default: found by its name, if there is one.
        label: column of the label; may be repeated for multilabel. Default: found by its name.
        document: column of the document of a row; its rows are read in order, with memory. files: each file is a document.
        set_: section.key=value, overrides the task; may be repeated. txl settings TASK lists them.
        seed: seed of the order of texts, of dropout and of the new head.
        resume: resume the run in --out, or start it if there is none.
        quiet: show warnings only.
        json_: print one JSON object at the end: scores, the best step, pictures.
    """
    from transformer_xl.training.finetune import finetune as finetune_model

    display = _display(quiet)
    outcome = finetune_model(
        run,
        task=task,
        data=data,
        out=out,
        overrides=set_ or [],
        text=text,
        pair=pair,
        label=label or None,
        document=document,
        seed=seed,
        resume=resume,
        display=display,
    )
    if json_ and is_reporter():
        print(json.dumps(outcome.as_dict()))
    if outcome.stopped_by:
        sys.exit(128 + outcome.stopped_by)
    for picture in outcome.pictures:
        display.say(f"see {picture}")
    display.say(f"next: txl predict {shlex.quote(str(outcome.directory))} FILE")


def _display(quiet: bool) -> "Display":
    """Return what a training shows, in the first process; memory that is freed is kept for the next step."""
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.training.display import Display

    keep_freed_memory()
    return Display(quiet=quiet or not is_reporter())


def _compatible(recipe: str | None, overrides: list[str]) -> Iterator[str]:
    """Yield the settings of a model that other programs can express."""
    from transformer_xl.config.model import TransformerXLConfig
    from transformer_xl.config.recipes import load_recipe
    from transformer_xl.conversion.export import COMPATIBLE

    config = load_recipe("quickstart" if recipe is None else recipe, overrides)
    if config.model.kind != TransformerXLConfig.kind:
        raise ConfigError(
            f"'{config.name}' is of kind '{config.model.kind}', which no other program has; leave --compatible out"
        )
    for name, value in COMPATIBLE.items():
        own = getattr(config.model, name)
        if own != value and any(override.partition("=")[0].strip() == f"model.{name}" for override in overrides):
            raise ConfigError(f"--set model.{name}={own} contradicts --compatible, which needs {value}; leave one of them out")
        yield f"model.{name}={'none' if value is None else json.dumps(value)}"


def _is_text(recipe: str) -> bool:
    """Return whether what stands in place of a recipe is a text: a file, a directory or a glob."""
    from transformer_xl.checkpoint.run_directory import RunDirectory
    from transformer_xl.config.recipes import recipe_names

    path, names = Path(recipe), recipe_names()
    if path.suffix == ".toml" or recipe in names:
        return False
    if RunDirectory(path).holds_run:
        where = shlex.quote(recipe)
        raise ConfigError(
            f"'{recipe}' is a run, not a text; continue it with txl train --resume --out {where}, or begin another run with "
            f"its weights: txl train TEXT --from {where}"
        )
    if path.expanduser().exists() or any(glob.iglob(str(path.expanduser()), recursive=True)):  # noqa: PTH207 - absolute ones
        return True
    if any(sign in recipe for sign in "*?["):
        raise ConfigError(f"no file matches '{recipe}'; give a text, or a recipe that txl recipes lists")
    if any(sign in recipe for sign in "./"):
        raise FileNotFoundError(errno.ENOENT, "there is no such text", recipe)
    known = {*names, *(each.name for each in Path().iterdir())}
    hint = did_you_mean(recipe, known if nearest(recipe, known) else names, listed_by="txl recipes")
    raise ConfigError(f"'{recipe}' is neither a recipe nor a text here; {hint}")


def _name_of_text(text: str) -> str:
    """Return a name for a run on a text: that of the file or directory, or of the directory in which a glob begins.

    Example:
        >>> _name_of_text("old/my.txt.xz"), _name_of_text("books/*.txt")
        ('my', 'books')
    """
    parts = [part for part in Path(text).expanduser().parts if not any(sign in part for sign in "*?[")]
    return os.path.basename(os.path.realpath(Path(*parts))).strip(".").partition(".")[0] or "text"  # noqa: PTH119 - no loops


def _dry_run(
    recipe: str | None, corpus: str | None, base: str | None, out: Path | None, overrides: list[str], *, grow: bool
) -> None:
    """Print the plan, on this machine, of the run that would be trained; `out`: of that run if there is one."""
    from transformer_xl.checkpoint.run_directory import RunDirectory, load
    from transformer_xl.model.build import count_parameters
    from transformer_xl.tools.hardware import this_machine
    from transformer_xl.tools.plan import can_plan, make_plan, plan_table, vocabulary
    from transformer_xl.training.run import Pretraining, comparison
    from transformer_xl.training.start import complete, resumed_settings

    objective = Pretraining(recipe, overrides, corpus, base, grow=grow)
    run = None if out is None else RunDirectory(out)
    goes_on = run is not None and run.holds_run
    config = resumed_settings(objective, run) if run and goes_on else objective.new_settings()
    if grow and base and not goes_on:
        size = objective.vocabulary_for(config, load(base)[1]).vocab_size
        config = config.changed(model={"vocab_size": size})
        print(printable(objective.vocabulary_note or "the vocabulary has all characters of the text; it does not grow"))
    if can_plan(config.model):
        plan = make_plan(config, this_machine(config.train.device, config.train.precision))
        model = plan.model
        print(plan_table(plan))
    else:
        size, origin = vocabulary(config)
        model = complete(config, size).model
        known = f"vocabulary of {size:,} ({origin})"
        print(printable(f"{config.name}: {count_parameters(model):,} parameters of kind {model.kind}, {known}"))
    if config.train.lora_rank is not None:
        print(f"this plan is of all weights; with train.lora_rank={config.train.lora_rank} gradients and optimizer take less")
    if compared := comparison(config.model_copy(update={"model": model})):
        print(printable(compared))
    if not can_plan(model):
        print(f"memory, operations and time cannot be planned for models of kind {model.kind}")
