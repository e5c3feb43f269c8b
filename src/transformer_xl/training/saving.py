"""Save the state of a run, so that no failure costs an earlier checkpoint."""

from typing import Any

from transformer_xl.errors import CheckpointError, ToldElsewhereError, TrainingError
from transformer_xl.training.run import Best, Run


def save(run: Run, *, best: Best | None = None, must: bool) -> int | None:
    """Save a checkpoint and return its step; a failure is fatal only for the last one (`must`)."""
    trainer = run.trainer
    if trainer.bad_in_a_row and not must:  # they may be the beginning of the end, which must not replace a good checkpoint
        return None
    newest_best = best or run.best
    record: dict[str, Any] = {
        "interval": vars(run.interval),
        "best": vars(newest_best) if newest_best else None,
        "training_text": run.corpus.training_sha256,
    }
    try:
        finite = trainer.finite
        with run.world.agreed():
            if not finite:
                raise TrainingError(
                    f"weights are not finite after step {trainer.step}, so they are not saved; the checkpoints before are "
                    "intact, resume with a lower optim.lr or optim.clip"
                )
        checkpoint = trainer.checkpoint(record)
        with run.world.agreed():
            if checkpoint is not None:
                run.record.sync()
                run.store.save(checkpoint, best=best is not None)
    except (CheckpointError, TrainingError, ToldElsewhereError) as error:
        if must:
            raise
        run.display.warn(f"{error}; training goes on")
        return None
    run.best = newest_best
    return trainer.step
