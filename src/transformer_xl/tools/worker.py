"""Train and score the runs of an ablation that are left. Several processes share them, and none repeats another's work."""

import math
from functools import cached_property
from typing import Any

import torch

from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config.run import RunConfig
from transformer_xl.console import progress, say
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.errors import TrainingError, TxlError, counted
from transformer_xl.reading.reading import Reading
from transformer_xl.tools.ablation import Ablation
from transformer_xl.tools.budget import ROUNDS, budgeted, make_parts, measure_paces, n_parameters, steps_of
from transformer_xl.tools.comparison import score
from transformer_xl.tools.lengths import readings
from transformer_xl.tools.variants import Trial, Variant
from transformer_xl.training.display import Display
from transformer_xl.training.run import train
from transformer_xl.training.start import check_model


class Worker:
    """Trains and scores the runs that are left, in one process; if `quiet`, only warnings are shown."""

    def __init__(self, ablation: Ablation, *, quiet: bool = False) -> None:
        self.ablation, self.quiet = ablation, quiet
        self._corpora: dict[str, PreparedCorpus] = {}

    def corpus(self, variant: Variant) -> PreparedCorpus:
        """Return the corpus of a variant, encoded if necessary; variants with equal settings share it."""
        config = variant.config
        key = config.data.model_dump_json() + config.tokenizer.model_dump_json()
        if key not in self._corpora:
            self._corpora[key] = prepare(config.data, config.tokenizer)
        return self._corpora[key]

    def check(self) -> None:
        """Prepare the texts of all runs that are left, and check the settings of new ones, before any run takes hours."""
        left = [trial for trial in self.ablation.plan.trials if not self.is_done(trial)]
        for variant in self.ablation.plan.variants:
            own = [trial for trial in left if trial.variant is variant]
            if not own:
                continue
            try:
                check_model(variant.config)
                corpus = self.corpus(variant)
                if not all(RunDirectory(self.ablation.path_of(trial)).holds_run for trial in own):
                    with torch.device("meta"):  # budget and seed make no difference here
                        make_parts(variant.config, corpus)
            except TxlError as error:
                raise type(error)(f"variant '{variant.name}': {error}") from None

    @cached_property
    def paces(self) -> dict[str, float]:
        """Seconds of a step of each variant whose budget is time; measured once, and stored."""
        ablation = self.ablation
        if not ablation.plan.paced:
            return {}
        if stored := ablation.stored_paces():
            return stored
        with ablation.alone(lambda: self._say("another process measures the time of a step; waiting for it")):
            stored = ablation.stored_paces()
            if not stored:
                stored = self._measured(ablation.plan.paced, rounds=ROUNDS)
                ablation.save_paces(stored)
        return stored

    def forecast(self) -> list[dict[str, Any]]:
        """Return name, parameters, steps and expected seconds of training of each variant.

        A time of a step that is not stored is measured in a single turn, and not stored.
        """
        ablation = self.ablation
        variants = ablation.plan.variants
        parameters = [n_parameters(variant.config, self.corpus(variant).tokenizer.vocab_size) for variant in variants]
        stored = ablation.stored_paces()
        paces = self._measured([v for v in variants if v.name not in stored], rounds=1) | stored
        rows = []
        for variant, n_parameter in zip(variants, parameters, strict=True):
            pace = paces[variant.name]
            steps = steps_of(budgeted(ablation.plan, Trial(variant, variant.config.train.seed), paces))
            row = {"variant": variant.name, "parameters": n_parameter, "more_parameters": n_parameter / parameters[0] - 1}
            row |= {"steps": steps, "step_seconds": pace}
            rows.append(row | {"seconds": None if steps is None else steps * pace})
        return rows

    def go_on(self) -> list[str]:
        """Train and score all runs that no other process has claimed, and return the names of those that others have.

        Raises:
            KeyboardInterrupt: a signal, its argument, ended it; everything is stored.
            TxlError: the directory cannot be read or written. If a run fails, this is stored, and the others go on.
        """
        plan = self.ablation.plan
        n_run, n_done = len(plan.trials), sum(map(self.is_done, plan.trials))
        seeds = f" with {plan.seeds} seeds" if plan.seeds > 1 else ""
        done = f", {n_done} of them done" if n_done else ""
        self._say(f"{self.ablation.directory}: {counted(len(plan.variants), 'variant')}{seeds}, {counted(n_run, 'run')}{done}")
        paces = self.paces
        while True:
            busy, progressed = [], False
            for trial in plan.trials:
                if self.is_done(trial):
                    continue
                with self.ablation.claimed(trial) as ours:
                    if not ours:
                        busy.append(trial.name)
                    elif not self.is_done(trial):
                        self._finish(trial, budgeted(plan, trial, paces))
                        progressed = True
            if not progressed:
                return busy

    def is_done(self, trial: Trial) -> bool:
        """Return whether nothing is left to do for a run."""
        result = self.ablation.result(trial)
        return result is not None and ("failed" in result or result.get("done", False))

    def _finish(self, trial: Trial, config: RunConfig) -> None:
        parameters = n_parameters(config, self.corpus(trial.variant).tokenizer.vocab_size)
        facts = {"run": trial.name, "variant": trial.variant.name, "seed": trial.seed, "parameters": parameters}
        result = self.ablation.result(trial) or facts
        try:
            if "scores" not in result:
                result = facts | self._trained(trial, config)
                self.ablation.save_result(trial, result)
            self._score(trial, result)
        except TxlError as error:
            self._say(f"{trial.name} failed: {error}; to try again, delete {self.ablation.result_path(trial)}")
            self.ablation.save_result(trial, result | {"failed": str(error)})

    def _trained(self, trial: Trial, config: RunConfig) -> dict[str, Any]:
        """Train a run, or go on where it was interrupted; return what it used, and its validation score."""
        path = self.ablation.path_of(trial)
        outcome = train(config, out=path, resume=True, display=_TrialDisplay(name=trial.name, quiet=self.quiet))
        if outcome.stopped_by:
            raise KeyboardInterrupt(outcome.stopped_by)
        valid = outcome.score.as_dict() if outcome.score else None
        used = {"steps": outcome.step, "tokens": outcome.tokens, "seconds": round(outcome.seconds, 3)}
        return used | {"validation": valid, "scores": []}

    def _score(self, trial: Trial, result: dict[str, Any]) -> None:
        """Score a trained run with its own and other attention lengths, and store each score at once."""
        plan, path = self.ablation.plan, self.ablation.path_of(trial)
        config = RunDirectory(path).config()
        wanted = list(dict.fromkeys([Reading.of_run(config), *readings(config, plan.lengths)]))
        done = [scored["reading"] for scored in result["scores"]]
        missing = [reading for reading in wanted if _as_dict(reading) not in done]
        if missing:
            opened = open_run(path, device=config.train.device, on_damaged=self._say)
            text, tokenizer = opened.text(limit=plan.tokens), opened.tokenizer
            result |= {"text": text.what, "tokenizer": tokenizer.fingerprint, "unit": tokenizer.kind, "loses": tokenizer.loses}
            n_token = len(missing) * (len(text.ids) - 1)
            with progress(f"scoring {trial.name}", n_token, hidden=self.quiet) as bar:
                for reading in missing:
                    found = score(opened, text, reading, on_tokens=bar.advance)
                    if not math.isfinite(found.nats):
                        raise TrainingError(f"losses with an attention length of {reading.length:,} are not finite")
                    result["scores"].append({"reading": _as_dict(reading), "score": found.as_dict()})
                    self.ablation.save_result(trial, result)
        self.ablation.save_result(trial, result | {"done": True})
        own = result["scores"][0]["score"]
        figures = f"{own['loss']:.4f} nats per token, {own['bpc']:.4f} bits per character"
        self._say(f"{trial.name}: {figures} on {result['text']}")

    def _measured(self, variants: list[Variant], *, rounds: int) -> dict[str, float]:
        """Measure the time of a step of variants in turn, if there are any; no thread draws a bar meanwhile."""
        if not variants:
            return {}
        self._say("measuring the time of a step of each variant, in turn")
        configs = {variant.name: variant.config for variant in variants}
        corpora = {variant.name: self.corpus(variant) for variant in variants}
        with progress("", rounds * len(variants), unit=None, hidden=self.quiet) as bar:

            def report(name: str) -> None:
                bar.advance()
                bar.note(name)

            return measure_paces(configs, corpora, rounds=rounds, report=report)

    def _say(self, text: str) -> None:
        say(text, quiet=self.quiet)


class _TrialDisplay(Display):
    """The display of one of many runs: its progress, with its name; the worker says how it ended."""

    def say(self, text: str) -> None:
        pass

    def show(self, text: str, *, title: str) -> None:
        pass


def _as_dict(reading: Reading) -> dict[str, int]:
    """Return the numbers in which readings of one run differ."""
    return {name: getattr(reading, name) for name in ("length", "tgt_len", "mem_len", "ext_len", "batch_size")}
