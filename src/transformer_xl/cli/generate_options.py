"""The options of `txl generate` in groups, with their checks and meanings."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Group, Parameter

from transformer_xl.cli.options import Flag, Json, Natural, Opening, Positive, Precision
from transformer_xl.cli.prompts import STDIN, Prompt, beginning, from_file, is_piped, many, nothing, typed
from transformer_xl.console import warn
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.files import check_file
from transformer_xl.generation.sampling import NUMBERS, Sampling

if TYPE_CHECKING:
    from transformer_xl.generation.stopping import Stopping
    from transformer_xl.tokenizers.base import Tokenizer

_MayBeginWithHyphen = Parameter(allow_leading_hyphen=True)
_RepeatedText = Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, allow_leading_hyphen=True)]


@Parameter(name="*", group=Group("What to continue", sort_key=1))
@dataclass(frozen=True)
class PromptSource:
    """What to continue.

    Args:
        prompt: text to continue. Default: what is piped in, else a line end.
        prompt_file: take the prompt from this file, as it is; - is standard input. A text of any length is read.
        prompts: many prompts: one per line, or JSON lines {"prompt": TEXT, "seed": NUMBER}; - is standard input.
        interactive: the model continues each line that you type; /help says more.
    """

    prompt: Annotated[str | None, _MayBeginWithHyphen] = None
    prompt_file: Annotated[Path | None, _MayBeginWithHyphen] = None
    prompts: Annotated[Path | None, _MayBeginWithHyphen] = None
    interactive: Flag = False

    @property
    def n_source(self) -> int:
        """How many of the options that exclude each other are set."""
        return sum(option is not None for option in (self.prompt, self.prompt_file, self.prompts))

    def read(self, tokenizer: "Tokenizer", *, continues: bool) -> list[Prompt]:
        """Return the prompts; by default a beginning, or an empty prompt if a session goes on."""
        if self.prompts is not None:
            return many(self.prompts, tokenizer)
        if self.prompt is not None:
            try:
                prompt = typed(self.prompt, tokenizer)
            except TokenizerError as error:
                raise ConfigError(f"--prompt: {error}") from None
            if len(prompt.ids) == 0 and not continues:
                is_lost = " holds nothing that this model's tokenizer keeps" if self.prompt else " is empty"
                raise ConfigError(
                    f"--prompt {self.prompt!r}{is_lost}; give some text, or leave --prompt out to begin a new one"
                )
            return [prompt]
        if self.prompt_file is not None:
            return [from_file(self.prompt_file, tokenizer)]
        if self.interactive:
            return []
        if is_piped():
            piped = from_file(STDIN, tokenizer)
            if len(piped.ids):
                return [piped]
            warn("nothing was piped in")
        return [nothing() if continues else beginning(tokenizer)]


@Parameter(name="*", group=Group("How much to write", sort_key=2))
@dataclass(frozen=True)
class Length:
    """How much to write.

    Args:
        tokens: how many tokens to write at most.
        n: texts per prompt.
        stop: text that ends the writing and is not part of it; may be repeated.
        stop_token: token that ends the writing: its text or its id; may be repeated.
    """

    tokens: Annotated[Natural, Parameter(name=["--tokens", "--max-tokens"])] = 500
    n: Annotated[Positive, Parameter(name=["--n", "-n"])] = 1
    stop: _RepeatedText = None
    stop_token: _RepeatedText = None

    def stopping(self, tokenizer: "Tokenizer") -> "Stopping":
        """Return what ends a text."""
        from transformer_xl.generation.stopping import Stopping

        tokens = [_token(text, tokenizer, "--stop-token") for text in self.stop_token or []]
        stopping = Stopping(strings=self.stop or [], tokens=tokens)
        stopping.check(tokenizer.vocab_size)
        return stopping


_CHOICE = Group("How tokens are chosen", sort_key=3)


@Parameter(name="*", group=_CHOICE)
@dataclass(frozen=True, kw_only=True)
class TokenChoice(Sampling):
    """How tokens are chosen.

    Args:
        bias: TOKEN=NUMBER, added to the score of a token, given by its text or its id; -inf bans it; may be repeated.
        seed: the same seed gives the same text. Default: --memory continues its random numbers; else a new seed each time.
    """

    temperature: float = 0.8
    logit_bias: Annotated[Mapping[int, float], Parameter(parse=False)] = field(default_factory=dict)
    bias: _RepeatedText = None
    seed: Natural | None = None

    @property
    def draws(self) -> list[str]:
        """The options that are set and say how tokens are drawn: all but a ban."""
        names = [name for name in (*NUMBERS, "seed") if getattr(self, name) != getattr(TokenChoice(), name)]
        names += ["bias"] if any(value > -math.inf for _, value in self._biases()) else []
        return [f"--{name.replace('_', '-')}" for name in names]

    def _biases(self) -> Iterator[tuple[str, float]]:
        for text in self.bias or []:
            token, equals, number = text.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = None
            if not equals or not token or value is None or not value < math.inf or "_" in number:
                raise ConfigError(f"--bias '{text}' is not TOKEN=NUMBER, such as the=-2.5 or 17=-inf")
            yield token, value

    def sampling(self, tokenizer: "Tokenizer") -> Sampling:
        """Return how tokens are drawn, with the bias of token ids."""
        biases = {_token(token, tokenizer, "--bias"): value for token, value in self._biases()}
        sampling = replace(self, logit_bias=biases)
        sampling.check(tokenizer.vocab_size)
        return sampling


@Parameter(name="*", group=_CHOICE)
@dataclass(frozen=True)
class Beams:
    """How texts are searched.

    Args:
        beams: search for the likeliest texts and keep this many at each token, instead of drawing tokens; -n shows several.
        length_penalty: with --beams: compare texts by log P / ((5 + tokens) / 6)^NUMBER; higher prefers longer. Default: 1.
    """

    beams: Positive | None = None
    length_penalty: float | None = None


@Parameter(name="*", group=Group("What is printed", sort_key=4))
@dataclass(frozen=True)
class Output:
    """What is printed.

    Args:
        stream: print text as it is generated. Default: if there is only one text; with --json: also a line for each token.
        echo: print the prompt too. Default: if it was typed.
        json_: print a JSON line for each finished text.
        logprobs: with --json: log-probabilities that the model gave to the tokens, and to the N likeliest.
        out: write prompt and text to this file instead, as ids: .npy.
        quiet: show no progress and no figures, only warnings and errors.
    """

    stream: bool | None = None
    echo: bool | None = None
    json_: Json = False
    logprobs: Natural | None = None
    out: Annotated[Path | None, Parameter(metavar="FILE")] = None
    quiet: Flag = False


@Parameter(name="*", group=Group("Memory", sort_key=5))
@dataclass(frozen=True)
class Remembered:
    """What is remembered from call to call.

    Args:
        memory: continue from this file, if it exists, and save to it what was read and written.
        read_only: with --memory: leave the file as it is; each of many texts continues from it.
        mem_len: positions of memory. Default: as in training, or that of --memory.
    """

    memory: Annotated[Path | None, Parameter(metavar="FILE")] = None
    read_only: Flag = False
    mem_len: Natural | None = None

    def existing_file(self) -> Path | None:
        """Return the file that the session continues from; None: it begins anew.

        Refuse a file that could not be saved, before anything is read. With `read_only` nothing is saved, and the file must
        exist: it is returned unchecked, and opening it says if it is missing.
        """
        file = self.memory
        if file is not None and not self.read_only:
            check_file(file, option="memory")
        return file if file and (self.read_only or file.exists()) else None

    def agreed(self, file: Path, precision: str | None) -> tuple[int | None, Any]:
        """Return the memory length and the precision that a session's file was read with; refuse another one that was given."""
        from transformer_xl.generation.session_file import describe_session

        known = describe_session(file)["decoder"]
        length, theirs = known.get("mem_len"), known.get("precision")
        read_with: dict[str, Any] = {
            "mem-len": length if type(length) is int and 0 <= length < 2**63 else None,
            "precision": theirs if theirs in get_args(Precision) else None,
        }
        for name, given in {"mem-len": self.mem_len, "precision": None if precision == "auto" else precision}.items():
            if given is not None and read_with[name] not in (None, given):
                raise ConfigError(
                    f"--{name} ({given}): '{file}' was read with {read_with[name]}; leave --{name} out, or start anew"
                )
        mem_len = self.mem_len if read_with["mem-len"] is None else read_with["mem-len"]
        return mem_len, read_with["precision"] or precision


MACHINE = Group("Model and machine", sort_key=6)


@Parameter(name="*", group=MACHINE)
@dataclass(frozen=True)
class Machine:
    """How it is computed.

    Args:
        batch_size: texts written side by side. Default: 8, or as many as there are.
        precision: of weights and memory; auto takes fp32 or bf16, whichever is faster here. Default: fp32, or that of --memory.
        compile: compile the model first; takes seconds and a C++ compiler. auto: for many tokens on a CPU, not --interactive.
    """

    batch_size: Positive | None = None
    precision: Precision | None = None
    compile: Literal["auto", "yes", "no"] = "auto"


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """All options of `txl generate`."""

    source: PromptSource = PromptSource()
    length: Length = Length()
    choice: TokenChoice = TokenChoice()
    beam: Beams = Beams()
    output: Output = Output()
    remembered: Remembered = Remembered()
    machine: Machine = Machine()
    opening: Annotated[Opening, Parameter(group=MACHINE)] = Opening()

    def __post_init__(self) -> None:
        source, output, memory = self.source, self.output, self.remembered.memory
        has_several = self.length.n > 1 or source.prompts is not None
        refuse(source.n_source > 1, "--prompt, --prompt-file and --prompts: give one")
        refuse(
            self.beam.length_penalty is not None and self.beam.beams is None,
            "--length-penalty compares texts of a beam search; add --beams N",
        )
        refuse(self.remembered.read_only and memory is None, "--read-only says what to do with the FILE of --memory; give one")
        refuse(
            self.length.n > 1 and self.choice.temperature == 0,
            f"--n ({self.length.n}) with --temperature 0 writes the same text again and again; leave --n out",
        )
        refuse(
            bool(output.stream) and has_several and not output.json_,
            "--stream shows one text; with several, leave it out or add --json",
        )
        refuse(output.logprobs is not None and not output.json_, "--logprobs are printed with --json only; add --json")
        refuse(
            memory is not None and not self.remembered.read_only and has_several,
            "--memory remembers one text; with --n or --prompts add --read-only, so that each text continues FILE",
        )
        refuse(source.interactive and sys.stdin is None, "--interactive needs standard input, which is closed")
        refuse(
            source.interactive and (has_several or output.json_ or output.stream is False),
            "--interactive writes one text as it comes; leave --n, --prompts, --json and --no-stream out",
        )
        refuse(
            output.out is not None and (source.interactive or output.json_ or bool(output.stream)),
            "--out writes texts to a file once they are finished; leave --interactive, --json and --stream out",
        )
        if output.out is not None:
            refuse(output.out.suffix != ".npy", f"--out '{output.out}' must end in .npy")
            refuse(has_several, f"--out '{output.out}' holds one text; print several with --json")
            check_file(output.out, option="out")
        if self.beam.beams is not None:
            self._check_search()

    def _check_search(self) -> None:
        """Refuse what a search does not do."""
        output = self.output
        given = {
            "--stop": self.length.stop,
            "--interactive": self.source.interactive,
            "--memory": self.remembered.memory,
            "--stream": output.stream,
            "--logprobs": output.logprobs is not None,
            "--out": output.out,
        }
        unfit = ", ".join([*self.choice.draws, *(name for name, value in given.items() if value)])
        refuse(
            bool(unfit),
            f"--beams draws nothing by chance, and prints whole texts; leave {unfit} out (--bias TOKEN=-inf bans a token, "
            "--stop-token TOKEN ends a text)",
        )


def refuse(wrong: bool, complaint: str) -> None:
    """Raise a `ConfigError` if something is wrong."""
    if wrong:
        raise ConfigError(complaint)


def _token(text: str, tokenizer: "Tokenizer", option: str) -> int:
    """Return the id of a token from its id, its text, or its text in JSON."""
    if text.isascii() and text.isdecimal():  # other digits are characters of a text
        if int(text) >= tokenizer.vocab_size:
            raise ConfigError(f"{option} {text}: token ids end at {tokenizer.vocab_size - 1:,}")
        return int(text)
    typed = text
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            text = json.loads(text)
        except ValueError:
            raise ConfigError(f'{option} {typed}: not text in JSON; write it as "text", or give the token\'s id') from None
    try:
        ids = tokenizer.encode(text).tolist()
    except TokenizerError as error:
        raise ConfigError(f"{option} {typed!r}: {error}") from None
    if len(ids) != 1:
        raise ConfigError(f"{option} {typed!r} is {len(ids)} tokens ({ids[:8]}) for this model, not one; give the token's id")
    return ids[0]
