"""Train and score what an ablation has left to do; several processes share it, and none repeats what another has done."""

import math
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol, TypedDict

from transformer_xl.analysis.ablation.ablation import Ablation
from transformer_xl.analysis.ablation.budget import budgeted
from transformer_xl.analysis.ablation.pace import ROUNDS, Pace, measure_paces, n_parameters
from transformer_xl.analysis.ablation.plan import Trial
from transformer_xl.analysis.ablation.variants import Variant
from transformer_xl.analysis.reading.lengths import readings
from transformer_xl.analysis.reading.scoring import score
from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.config import RunConfig
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.errors import TrainingError, TxlError
from transformer_xl.reading.how import Reading
from transformer_xl.texts import split_text
from transformer_xl.training.display import Display
from transformer_xl.training.record import read_metrics
from transformer_xl.training.run import train
from transformer_xl.training.starting import check_start


class Watcher(Protocol):
    """Who is told how far an ablation is."""

    def say(self, text: str) -> None:
        """Show a line."""
        ...

    def training(self, trial: Trial) -> Display:
        """Return what shows how a run is trained."""
        ...

    def measuring(self, n: int) -> AbstractContextManager[Any]:
        """Show a bar of `n` turns; yields what to call with the name of each."""
        ...

    def scoring(self, trial: Trial, tokens: int) -> AbstractContextManager[Any]:
        """Show a bar of so many tokens; which is told of those just scored."""
        ...


class Scored(TypedDict):
    """The score of a reading, in JSON."""

    reading: dict[str, int]
    score: dict[str, Any]


class Texts:
    """The prepared corpora of variants; equal ones are opened once."""

    def __init__(self) -> None:
        self._opened: dict[str, PreparedCorpus] = {}

    def of(self, variant: Variant) -> PreparedCorpus:
        """Return the corpus of a variant, encoding it first if need be."""
        config = variant.config
        key = config.data.model_dump_json() + config.tokenizer.model_dump_json()
        if key not in self._opened:
            self._opened[key] = prepare(config.data, config.tokenizer)
        return self._opened[key]


class Work:
    """What an ablation has left to do, for one process.

    Args:
        ablation: to go on with.
        watcher: told how far it is.
    """

    def __init__(self, ablation: Ablation, watcher: Watcher) -> None:
        self.ablation, self.watcher = ablation, watcher
        self.texts = Texts()

    @cached_property
    def paces(self) -> dict[str, Pace]:
        """Time of a step of each variant whose budget is time; measured once, and stored."""
        ablation = self.ablation
        if not ablation.plan.paced:
            return {}
        if stored := ablation.paces():
            return stored
        with ablation.alone(lambda: self.watcher.say("another process measures the time of a step; waiting for it")):
            stored = ablation.paces()
            if not stored:
                stored = measured(ablation.plan.paced, self.texts, self.watcher)
                ablation.save_paces(stored)
        return stored

    def parameters(self) -> dict[str, int]:
        """Return the number of parameters of each variant."""
        return {
            variant.name: n_parameters(variant.config, self.texts.of(variant).tokenizer.vocab_size)
            for variant in self.ablation.plan.variants
        }

    def check(self) -> None:
        """Prepare the text of every run that is left and check the settings of those that are new, before others take hours.

        Raises:
            TxlError: what a run would fail at, with the name of its variant.
        """
        left = [trial for trial in self.ablation.plan.trials if not self.is_done(trial)]
        for variant in self.ablation.plan.variants:
            own = [trial for trial in left if trial.variant is variant]
            try:
                corpus = self.texts.of(variant) if own else None
                if corpus and not all(RunDirectory(self.ablation.path_of(trial)).holds_run for trial in own):
                    check_start(variant.config, corpus)  # neither its budget nor its seed would make a difference
            except TxlError as error:
                raise type(error)(f"variant '{variant.name}': {error}") from None

    def go_on(self) -> list[str]:
        """Train and score whatever no other process has; a signal ends it early.

        Returns:
            The names of runs that other processes are at.

        Raises:
            KeyboardInterrupt: a signal ended it; everything is stored.
            TxlError: the directory cannot be read or written; of a run that fails only a note is kept, and the others go on.
        """
        paces = self.paces
        while True:
            busy, progressed = [], False
            for trial in self.ablation.plan.trials:
                if self.is_done(trial):
                    continue
                with self.ablation.claimed(trial) as ours:
                    if not ours:
                        busy.append(trial.name)
                    elif not self.is_done(trial):
                        self._finish(trial, budgeted(self.ablation.plan, trial, paces))
                        progressed = True
            if not progressed:
                return busy

    def is_done(self, trial: Trial) -> bool:
        """Say whether nothing is left to do for a run."""
        return is_done(self.ablation.result(trial))

    def _finish(self, trial: Trial, config: RunConfig) -> None:
        parameters = n_parameters(config, self.texts.of(trial.variant).tokenizer.vocab_size)
        facts = {"run": trial.name, "variant": trial.variant.name, "seed": trial.seed, "parameters": parameters}
        result = self.ablation.result(trial) or facts
        try:
            if "scores" not in result:
                result = facts | self._trained(trial, config)
                self.ablation.save_result(trial, result)
            self._score(trial, result)
        except TxlError as error:
            self.watcher.say(f"{trial.name} failed: {error}; to try again, delete {self.ablation.result_path(trial)}")
            self.ablation.save_result(trial, result | {"failed": str(error)})

    def _trained(self, trial: Trial, config: RunConfig) -> dict[str, Any]:
        """Train a run, or go on where it was interrupted; returns what it used, and its score of the validation split."""
        path = self.ablation.path_of(trial)
        outcome = train(config, out=path, resume=True, display=self.watcher.training(trial))
        if not outcome.finished:
            raise KeyboardInterrupt
        last = [entry for entry in read_metrics(path) if entry["kind"] == "train"][-1]
        valid = outcome.score.as_dict() if outcome.score else None
        used = {"steps": outcome.step, "tokens": last["tokens"], "seconds": last["seconds"]}
        return used | {"validation": valid, "scores": []}

    def _score(self, trial: Trial, result: dict[str, Any]) -> None:
        """Score a trained run with its own reading and with other attention lengths; each is stored when it is known."""
        plan, directory = self.ablation.plan, RunDirectory(self.ablation.path_of(trial))
        config = directory.config()
        wanted = list(dict.fromkeys([Reading.of_run(config), *readings(config, plan.lengths, exact=plan.exact)]))
        done = [scored["reading"] for scored in result["scores"]]
        missing = [reading for reading in wanted if _as_dict(reading) not in done]
        if missing:
            model, tokenizer = load(directory.path, on_damaged=self.watcher.say)
            text = split_text(config, tokenizer, limit=plan.tokens)
            result |= {"text": text.what, "tokenizer": tokenizer.fingerprint, "unit": tokenizer.kind, "loses": tokenizer.loses}
            with self.watcher.scoring(trial, len(missing) * (len(text.ids) - 1)) as bar:
                for reading in missing:
                    measured = score(model, text, config, reading, on_tokens=bar.advance)
                    if not math.isfinite(measured.nats):
                        raise TrainingError(f"losses with an attention length of {reading.length:,} are not finite")
                    result["scores"].append(Scored(reading=_as_dict(reading), score=measured.as_dict()))
                    self.ablation.save_result(trial, result)
        self.ablation.save_result(trial, result | {"done": True})
        own = result["scores"][0]["score"]
        figures = f"{own['loss']:.4f} nats per token, {own['bpc']:.4f} bits per character"
        self.watcher.say(f"{trial.name}: {figures} on {result['text']}")


def _as_dict(reading: Reading) -> dict[str, int]:
    """Return what readings of one run differ in."""
    return {name: getattr(reading, name) for name in ("length", "tgt_len", "mem_len", "ext_len", "batch_size")}


def is_done(result: dict[str, Any] | None) -> bool:
    """Say whether nothing is left to do for a run."""
    return result is not None and ("failed" in result or result.get("done", False))


def measured(variants: list[Variant], texts: Texts, watcher: Watcher, *, rounds: int = ROUNDS) -> dict[str, Pace]:
    """Measure the time of a step of variants in turn, if there are any."""
    if not variants:
        return {}
    configs = {variant.name: variant.config for variant in variants}
    corpora = {variant.name: texts.of(variant) for variant in variants}
    with watcher.measuring(rounds * len(variants)) as report:
        return measure_paces(configs, corpora, rounds=rounds, report=report)
