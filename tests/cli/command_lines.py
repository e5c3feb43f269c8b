"""Random command lines, built from the options of every command: some arguments are good, some are hostile."""

import random
import shlex
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from cyclopts import App, ArgumentCollection


def _words(text: str) -> list[str]:
    return text.split()


_LONG = "n" * 300
_HUGE = "1" + "0" * 20  # more than 64 bits hold
_STRANGE = ["", " ", _LONG, "ünïcödé—ж", "\udce9\udcff", "a\nb", 'a\'b $(id) "c"', "\x1b[31m", "\x1b]0;title\x07\nred\r\x9b0m"]
_STRANGE += _words("- -- -x [red] %s{0} ../.. ~ *")
_INTEGERS = [_HUGE, f"-{_HUGE}", "9" * 5000, _LONG, ""]
_INTEGERS += _words("0 1 2 3 7 -1 1000000000 1000000000000 9223372036854775807 1e3 1.5 nan 0x10 ٣")
_NUMBERS = [_HUGE, _LONG, "", *_words("0 0.5 1 2 -1 1e400 -1e400 1e-400 nan inf -inf x")]
_LISTS = [_HUGE, *_words("1 0,1 2,4,8 1,1 , 1,,2 -1 1000000000 0.5 x")]
_DEVICES = [*_STRANGE, *_words("meta cuda cuda:99999999999999999999 mps cpu:1 xla hpu vulkan privateuseone")]

_RUNS = _words("run run run exported damaged")
_RECIPES = _words("tiny.toml tiny.toml quickstart wt103-base lstm-ptb vanilla-enwik8-12 nested.toml bytes.toml big.toml")
_TEXTS = _words("text.txt text.txt folder folder/*.txt packed.txt.gz words.jsonl")
_PLACES = _words("new new.png new.npy new.svg deep/new text.txt run folder null.png fifo.png")
_PATHS = [*_RUNS, *_RECIPES, *_TEXTS, *_PLACES, *_STRANGE]
_PATHS += [f"{_LONG}.png", f"{_LONG}.toml", f"{_LONG}/{_LONG}", "d/" * 2000]
_PATHS += _words("""
    . / missing missing/x text.txt/x a/b empty.txt empty noise.bin latin.txt nothing.gz ünïcödé.txt
    fifo fifo.toml fifo.txt.gz null zero full loop /proc/x /proc/self /proc/self/mem /sys/x.png
    run/config.json run/checkpoints run/tokenizer.json exported/model.safetensors
    missing.txt missing.toml missing.npy run/missing folder/ empty/ text.txt/ folder/0.txt/x run/run deep/er/new.png
""")

_SETTINGS = _words("""
    model.kind=lstm model.kind=vanilla model.attention=rotary model.attention=al_rfou model.cutoffs=[9,3] model.div_val=2
    model.cutoffs=[20,60] tokenizer.kind=word tokenizer.kind=char tokenizer.kind=bpe tokenizer.vocab_size=300
    max_steps=2 lr=1 train.nothing=1 nothing.nothing=1 train=3 model=3 eval=3 train.max_steps = .=1 ..= train.=1
    a.b.c.d=1 model={} train.max_steps=none train.average=ema optim.optimizer=muon optim.lr=1e30
    compared_with=missing compared_with=quickstart name=../../x name= name=a/b name=\udce9 name=2020-01-01
""")
_SETTINGS += [f"name={_LONG}", f"{_LONG}=1", 'name="""', "." * 3000 + "=1", "description=\x1b[31m"]
_SETTINGS += ["data.corpus=" + "[" * 3000, "train.x=" + "{a=" * 3000]
"""Settings of a run; any other has a value that was hardly meant for it."""

_GOOD = {
    ("RUN", "RUNS", "SOURCE"): _RUNS,
    ("RECIPE", "RECIPES"): _RECIPES,
    ("CORPUS", "--corpus"): _TEXTS,
    ("FILE", "--file"): ["text.txt", "packed.txt.gz"],
    ("--out", "--per-token", "--plot"): ["new.png", *_PLACES],
    ("--prompts", "--prompt-file", "--vocabulary"): ["words.jsonl", "text.txt", "-"],
    ("DESTINATION", "--memory"): ["new", "empty", "text.txt"],
    ("--rows", "--batch-size", "--tgt-len", "--lengths"): ["1", "1,2", "4,8", "0,4"],
    ("--prompt", "--stop", "--stop-token"): ["a", "the", "97"],
    ("--precision",): ["fp32", "fp32,bf16", "int8", "auto"],
    ("--bias",): ["a=1", "97=-inf", '"b"=2'],
    ("--attention",): ["shaw", "transformer_xl,shaw", "rotary,alibi"],
    ("--device",): ["auto", "cpu"],
    ("--gpu",): ["h100", "a100"],
    ("--import",): ["json"],
    ("--logger",): ["wandb"],
    ("--loss",): ["full,half"],
    ("--moses",): ["en"],
    ("--recurrence",): ["yes,no"],
    ("--search",): ["."],
    ("NAME",): ["enwik8", "ptb"],
}
"""What is meant for arguments that are text."""

_WORK = {"--tokens", "--n", "--repeats", "--seeds", "--steps", "--minutes", "--segments", "--loss"}
"""Options that say how much work is done. A great number is no mistake there, and would take a great time."""

_GREAT = {"1000000000", "1000000000000", "9223372036854775807", "inf", "1e400", "-inf", "-1e400"}

_SMALL = _words("""
    model.n_layer=1 model.d_model=8 model.n_head=2 model.d_head=4 model.d_inner=8 model.mem_len=4 model.cutoffs=[]
    model.div_val=1 train.batch_size=2 train.tgt_len=4 train.accumulate=1 train.precision=fp32
""")
"""Laid over every recipe before anything else."""

_LIMITS = {
    "serve": {"--port": ["99999"]},  # which no machine has: otherwise it serves until it is told to end
    "train": {"--set": ["train.max_minutes=0.003", "eval.max_tokens=50", "train.sample_tokens=2"]},
    "ablate": {"--steps": ["2"], "--tokens": ["50"], "--attention": ["transformer_xl"], "--loss": ["full"]},
    "generate": {"--tokens": ["5"]},
    "plot": {"--tokens": ["50"]},
    "bench": {"--tokens": ["2"], "--precision": ["fp32"]},
}
"""What is appended to commands that would take long, unless an option is there; --set in any case."""

_PIPED = ["", "the cat\n", "\n\n", "\udce9\udcff\0\n", "[" * 5000, '{"prompt": "the"}\n{"prompt": 3}\n']
_PIPED += ["/help\n/set\n/quit\n", f"/set temperature nan\n/set top_k {_HUGE}\nthe\n", "//\n/\n/set seed 1e5\n/set bias\n"]
_PIPED += ["/save fifo\n/load text.txt\n/save\n"]
"""For standard input."""


class Line(NamedTuple):
    """A command line."""

    arguments: list[str]
    piped: str  # into it

    def __str__(self) -> str:
        piped = f" <<< {self.piped!a}" if self.piped else ""
        return shlex.join(["txl", *self.arguments]).encode("unicode_escape", "surrogatepass").decode() + piped


def commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ArgumentCollection]]:
    """Yield the name of each command, such as "corpus list", and its arguments."""
    for name in app:
        if name.startswith("-"):
            continue
        if app[name].default_command:
            arguments = app[name].assemble_argument_collection()
            yield " ".join([*path, name]), ArgumentCollection(each for each in arguments if each.parse)
        yield from commands(app[name], (*path, name))


def lines(seed: int, n: int) -> list[Line]:
    """Draw `n` lines; each command has its turn."""
    from transformer_xl.cli import app

    draw, drawn = random.Random(seed), list(commands(app))
    return [_line(draw, *drawn[i % len(drawn)]) for i in range(n)]


def _line(draw: random.Random, command: str, all_arguments: Iterable[Any]) -> Line:
    arguments = [argument for argument in all_arguments if argument.names != ("*",)]
    hostility = draw.choice([0.0, 0.1, 0.3, 1.0])
    options = [argument for argument in arguments if argument.index is None]
    given: list[str] = []
    for argument in arguments:
        if argument.index is not None and draw.random() < (0.97 if argument.required else 0.8):
            n = draw.choice([1, 1, 2]) if argument.token_count()[1] else 1
            given += [_value(draw, argument, hostility) for _ in range(n)]
    has_recipe = any("--set" in argument.names for argument in options) and command != "convert"
    given += [part for setting in _SMALL if has_recipe for part in ("--set", setting)]
    chosen = draw.sample(options, min(len(options), draw.choice([0, 1, 1, 2, 3, 4, 6])))
    for argument in chosen:
        name = draw.choice(argument.names)
        if bool in _leaves(argument.hint):
            given.append(name)
        else:
            value = _value(draw, argument, hostility)
            given += [f"{name}={value}"] if draw.random() < 0.3 else [name, value]
    for option, values in _LIMITS.get(command, {}).items():
        if option in ("--set", "--port") or not any(option in argument.names for argument in chosen):
            given += [part for value in values for part in (option, value)]
    if draw.random() < 0.02:
        given.append(draw.choice(["--", "--frobnicate", "--help", "--version", _LONG, ""]))
    return Line([*command.split(), *given], draw.choice(_PIPED) if draw.random() < 0.2 else "")


def _value(draw: random.Random, argument: Any, hostility: float) -> str:
    name, kinds = argument.names[0], list(_leaves(argument.hint))
    hostile = draw.random() < hostility
    if name == "--set":
        return _setting(draw)
    if choices := [kind for kind in kinds if isinstance(kind, str)]:
        return draw.choice(_STRANGE if hostile else choices)
    if int in kinds or float in kinds:
        numbers, good = (_INTEGERS, ["1", "2", "4", "7"]) if int in kinds else (_NUMBERS, ["0.5", "0.9", "1"])
        if name in _WORK:
            numbers, good = [value for value in numbers if value not in _GREAT], good[:2]
        return draw.choice(numbers if hostile else good)
    good = [value for names, values in _GOOD.items() if name in names for value in values]
    if hostile or not good:
        return draw.choice(_DEVICES if name == "--device" else [*_PATHS, *_LISTS])
    return draw.choice(good)


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield the types in a type, and the values of its literals."""
    if typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    elif typing.get_origin(hint) in (typing.Union, types.UnionType, list, tuple):
        for part in typing.get_args(hint):
            yield from _leaves(part)
    else:
        yield hint


def _setting(draw: random.Random) -> str:
    from transformer_xl.config.model import TransformerXLConfig
    from transformer_xl.config.run import DataConfig, EvalConfig, OptimConfig, TokenizerConfig, TrainConfig

    if draw.random() < 0.4:
        return draw.choice(_SETTINGS)
    sections = {"model": TransformerXLConfig, "tokenizer": TokenizerConfig, "data": DataConfig, "eval": EvalConfig}
    sections |= {"optim": OptimConfig, "train": TrainConfig}
    section = draw.choice(list(sections))
    key = draw.choice(list(sections[section].model_fields))
    values = [*_INTEGERS, *_NUMBERS, "true", "none", "[]", "[1]", "{}", '"x"', "[1,2,3]", "4"]
    return f"{section}.{key}={draw.choice(values)}"
