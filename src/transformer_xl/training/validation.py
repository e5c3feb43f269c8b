"""Score a run in training on its validation split, and let it write a sample."""

import math

import numpy as np

from transformer_xl.data.prepare import TokenSplit
from transformer_xl.generation.generate import generate
from transformer_xl.reading.evaluation import Score, evaluate
from transformer_xl.reading.how import Reading
from transformer_xl.texts import beginning
from transformer_xl.training.run import Best, Run


def validate(run: Run) -> Best | None:
    """Score the validation split and write a sample; return the loss if it is the best so far."""
    split = run.corpus.splits["valid"]
    trainer, config = run.trainer, run.config
    if len(split.ids) < 2:
        return None
    score = score_split(run, split, limit=config.eval.max_tokens)
    averaged = score_of_average(run, split, limit=config.eval.max_tokens)
    trainer.schedule.validated(score.loss)
    more = {"average_loss": averaged.loss} if averaged else {}
    run.record.write(
        "valid",
        trainer.step,
        loss=score.loss,
        ppl=score.ppl,
        bpc=score.bpc,
        nats=score.nats,
        tokens=trainer.tokens,
        seconds=round(trainer.seconds, 3),
        **more,
    )
    of_average = f"; averaged weights {averaged.loss:.4f}" if averaged else ""
    run.display.say(
        f"step {trainer.step:,}: validation {score.loss:.4f} nats per token, {score.bpc:.3f} bits per character{of_average}"
    )
    if config.train.sample_tokens and math.isfinite(score.loss) and run.world.first and not trainer.model.is_sharded:
        text = _sample(run, split)
        run.record.write("sample", trainer.step, text=text)
        run.display.show(text, title=f"a sample at step {trainer.step:,}")
    best = Best(score.loss, trainer.step)
    if averaged and (averaged.loss < score.loss or math.isnan(score.loss)):
        best = Best(averaged.loss, trainer.step, average=True)
    return best if best.loss < (run.best.loss if run.best else math.inf) else None


def score_split(run: Run, split: TokenSplit, *, remembers: bool = True, limit: int | None) -> Score:
    """Evaluate on (the beginning of) a split, with a memory of its own: training's is not touched."""
    text, reading = beginning(split, run.tokenizer, limit), Reading.of_run(run.config)
    return evaluate(
        run.trainer.model,
        text.ids,
        **vars(reading if remembers else reading.without_memory()),
        n_characters=text.n_characters,
        n_bytes=text.n_bytes,
        precision=run.trainer.precision,
        world=run.world,
    )


def score_of_average(run: Run, split: TokenSplit, *, limit: int | None) -> Score | None:
    """Evaluate the averaged weights with memory; None if there are none yet."""
    average = run.trainer.average
    if not average.count:
        return None
    with average.in_place_of(run.trainer.model):
        return score_split(run, split, limit=limit)


def _sample(run: Run, split: TokenSplit) -> str:
    """Write on from the first tokens of the validation split; training's random numbers are not touched."""
    prompt = np.asarray(split.ids[:32], dtype=np.int64)
    written = generate(
        run.trainer.model,
        prompt.tolist(),
        max_new_tokens=run.config.train.sample_tokens,
        temperature=0.8,
        seed=run.trainer.step,
        precision=run.trainer.precision,
    )
    return run.tokenizer.decode(list(written))
