"""`txl finetune`."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

from transformer_xl.cli.options import TASKS, Flag, Json, Natural, Overrides, Repeated
from transformer_xl.process import is_reporter


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
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.training.display import Display
    from transformer_xl.training.finetune import finetune as learn

    keep_freed_memory()
    display = Display(quiet=quiet or not is_reporter())
    ended = learn(
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
        print(json.dumps(ended.as_dict()))
    if ended.stopped_by:
        sys.exit(128 + ended.stopped_by)
    for picture in ended.pictures:
        display.say(f"see {picture}")
    display.say(f"next: txl predict {shlex.quote(str(ended.directory))} FILE")
