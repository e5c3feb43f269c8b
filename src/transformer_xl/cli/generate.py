"""`txl generate`."""

import hashlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl.cli.generate_options import MACHINE, Asked, Choice, Length, Machine, Output, Remembered, Source, refuse
from transformer_xl.cli.options import Opening
from transformer_xl.console import say, warn
from transformer_xl.errors import ConfigError, room_for
from transformer_xl.generation.requests import Prompt

if TYPE_CHECKING:
    from pathlib import Path

    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.generation.job import Job
    from transformer_xl.generation.session import TextSession
    from transformer_xl.opening import Opened
    from transformer_xl.world import World

_DEFAULT_ROWS = 8
"""Texts written side by side: up to so many cost little more than one, because reading the weights takes most of the time."""

_INTERACTIVE_TOKENS = 20_000
"""About how many tokens a person will let a model write; decides whether compiling pays."""


def generate(
    run: str,
    /,
    *,
    source: Source = Source(),
    length: Length = Length(),
    choice: Choice = Choice(),
    output: Output = Output(),
    remembered: Remembered = Remembered(),
    machine: Machine = Machine(),
    opening: Annotated[Opening, Parameter(group=MACHINE)] = Opening(),
) -> None:
    """Write on from a prompt; the text appears as it comes.

    Common uses:
        txl generate runs/mine --prompt "Once upon a time" --seed 1
        txl generate runs/mine --prompt-file chapter1.txt --tokens 1000 --top-p 0.95
        cat chapter1.txt | txl generate runs/mine --temperature 0
        txl generate runs/mine --prompt "It was" -n 5 --min-p 0.05
        txl generate runs/mine --prompts many.jsonl --json > texts.jsonl
        txl generate runs/mine --prompt-file book.txt --tokens 0 --memory book
        txl generate runs/mine --prompt "In the end" --memory book --read-only
        txl generate runs/mine --prompts many.txt --memory book --read-only
        txl generate runs/mine --interactive --memory diary

    Of several texts each has a seed of its own, derived from --seed and printed
    with it, from which it can be written again alone.

    Ctrl-C ends all texts that have begun, and prints them; a second one aborts.
    With --memory, what was read and shown until then is saved; while the prompt
    is being read, or at a second Ctrl-C, the file stays as it was.

    Args:
        run: directory of a run, of an exported model, or a hub id.
        source: what to go on from.
        length: how much to write.
        choice: how tokens are chosen.
        output: what is printed.
        remembered: what is remembered from call to call.
        machine: how it is computed.
        opening: how the run is opened.
    """
    asked = Asked(run, source, length, choice, output, remembered, machine, opening)
    from transformer_xl.generation.requests import fresh_seed
    from transformer_xl.world import joined

    with joined() as world:
        drawn = world.from_first(fresh_seed())
        with world.agreed():
            task = _prepare(asked, drawn, world)
        if not world.alone:
            world.check_same(**_shared(asked, task))
        if source.interactive:
            _converse(asked, task)
        elif _write(asked, task, world):
            sys.exit(130)


@dataclass(frozen=True)
class _Task:
    """Texts to write, and what writes them.

    Attributes:
        prompts: of the texts.
        job: writes them.
        session: remembers what is read and written; None: nothing is remembered.
        goes_on: whether random numbers go on from where the session's file left them.
    """

    prompts: list[Prompt]
    job: "Job"
    session: "TextSession | None"
    goes_on: bool


def _prepare(asked: Asked, drawn_seed: int, world: "World") -> _Task:
    """Open the model and read the prompts; complain of what can be known before the model is loaded."""
    from transformer_xl.generation.job import Job
    from transformer_xl.generation.requests import check_seed
    from transformer_xl.generation.session import TextSession
    from transformer_xl.world import parts

    source, length, remembered = asked.source, asked.length, asked.remembered
    refuse(
        not world.alone and source.is_stdin,
        f"standard input is not divided among {world.size} processes; give --prompts FILE, or --prompt",
    )
    seed = drawn_seed if asked.choice.seed is None else check_seed(asked.choice.seed)
    file = remembered.existing_file()
    asked.choice.sampling()
    length.stopping()
    opened = asked.opening.open(asked.run, on_damaged=lambda message: warn(message, quiet=not world.first))
    sampling, stopping = asked.choice.sampling(opened.tokenizer), length.stopping(opened.tokenizer)
    prompts = source.read(opened.tokenizer, goes_on=file is not None)
    n_text = max(1, len(prompts)) * length.n
    has_session = source.interactive or remembered.memory is not None
    refuse(
        not world.alone and (has_session or n_text == 1),
        f"{world.size} processes divide texts, and this is one; give --prompts or --n, or start one process",
    )
    own = parts(range(n_text), world)
    decoder = _open_decoder(asked, opened, file, n_text=len(own))
    session, goes_on = None, False
    if has_session:
        # each turn of a conversation has a seed of its own
        keeps_drawing = asked.choice.seed is None and not remembered.read_only and not source.interactive
        session = TextSession(decoder, opened.tokenizer, keeps_drawing=keeps_drawing)
        if file is not None:
            session.load(file)
        if keeps_drawing and session.seed is not None:
            seed, goes_on = session.seed, True
    job = Job(
        decoder,
        opened.tokenizer,
        sampling,
        stopping,
        n_tokens=length.tokens,
        seed=seed,
        n=length.n,
        likeliest=asked.output.logprobs,
        own=own,
    )
    return _Task(prompts, job, session, goes_on)


def _open_decoder(asked: Asked, opened: "Opened", file: "Path | None", *, n_text: int) -> "Decoder":
    """Open a decoder for so many texts, as a session's file was read, or say what does not fit into memory."""
    from transformer_xl.generation.decoder import Decoder

    mem_len, precision = asked.remembered.mem_len, asked.machine.precision
    if file is not None:
        their_mem_len, their_precision = asked.remembered.read_with(file, opened.model.mem_len)
        mem_len = _agreed("--mem-len", mem_len, their_mem_len, file)
        precision = _agreed("--precision", None if precision == "auto" else precision, their_precision, file) or precision
    n_row = 1 if asked.remembered.memory is not None else min(asked.machine.batch_size or _DEFAULT_ROWS, max(1, n_text))
    texts = f"{n_row:,} texts side by side" if n_row > 1 else "a text"
    what = f"{texts}, looking back {mem_len or opened.model.mem_len:,} tokens,"
    with room_for(what, "lower --batch-size or --mem-len"):
        return Decoder(
            opened.model,
            batch_size=n_row,
            mem_len=mem_len,
            precision=precision or "fp32",
            compile={"auto": "auto", "yes": True, "no": False}[asked.machine.compile],
            expected_tokens=_INTERACTIVE_TOKENS if asked.source.interactive else asked.length.tokens * (n_text // n_row),
        )


def _agreed(option: str, given: Any, theirs: Any, file: "Path") -> Any:
    """Return what a session was read with, unless something else was asked for."""
    if None not in (given, theirs) and given != theirs:
        raise ConfigError(f"{option} ({given}): '{file}' was read with {theirs}; leave {option} out, or start anew")
    return given if theirs is None else theirs


def _shared(asked: Asked, task: _Task) -> dict[str, Any]:
    """Return what must be the same in all processes."""
    read = hashlib.sha256()
    for prompt in task.prompts:
        read.update(prompt.ids.tobytes() + f"|{prompt.seed}|".encode())
    length, job = asked.length, task.job
    options = {"n": job.n, "tokens": job.n_tokens, "seed": job.seed, "stop": [length.stop, length.stop_token]}
    return {
        "model": job.decoder.model.config.model_dump(mode="json"),
        "prompts": read.hexdigest(),
        "options": asked.choice.settings | options | {"bias": asked.choice.bias},
    }


def _converse(asked: Asked, task: _Task) -> None:
    """Let a person type, and the model go on."""
    from transformer_xl.cli.interactive import Conversation

    assert task.session is not None
    machine = _machine(task.job.decoder)
    Conversation(task.session, task.job, asked.remembered, quiet=asked.output.quiet, machine=machine).run(task.prompts)


def _write(asked: Asked, task: _Task, world: "World") -> bool:
    """Write and print the texts; return whether it was interrupted."""
    from transformer_xl.cli.showing import JsonPrinter, StreamPrinter, TextPrinter, gathered_output, reading_bar
    from transformer_xl.generation.job import Interrupts, Printer, StoppedReading

    output, memory = asked.output, asked.remembered.memory
    prompts, job, session = task.prompts, task.job, task.session
    is_one = len(prompts) * job.n == 1
    printer: Printer
    if output.json_:
        printer = JsonPrinter(tokenizer=job.tokenizer, stream=bool(output.stream), logprobs=output.logprobs is not None)
    elif is_one and output.stream is not False:
        printer = StreamPrinter(echo=output.echo, tokenizer=job.tokenizer)
    else:
        printer = TextPrinter(
            echo=output.echo, tokenizer=job.tokenizer, several=not is_one, first=job.own.start if job.own else 0
        )
    try:
        with reading_bar(sum(len(prompt.ids) for prompt in prompts), hidden=output.quiet or not is_one) as on_read:
            if session is None or memory is None:
                with Interrupts() as late, gathered_output(world):  # one that is done waits for the texts of the others
                    interrupted = job.run(prompts, printer, on_read)
                interrupted = world.any(interrupted or late.noted)
            elif asked.remembered.read_only:
                interrupted = job.ask(session, prompts, printer, on_read)
            else:
                with Interrupts() as interrupts:  # what was shown is saved, though somebody grew impatient
                    interrupted = job.go_on(session, prompts[0], printer, on_read)
                    session.save(memory)
                    interrupted = interrupted or interrupts.noted
    except StoppedReading:
        say(f"\nstopped reading; {memory} stays as it was", quiet=output.quiet)
        return True
    line = job.totals.of_all(world).line(_machine(job.decoder), job.seed, interrupted=interrupted)
    say(f"{line}, gone on with" if task.goes_on else line, quiet=output.quiet or output.json_ or not world.first)
    return interrupted


def _machine(decoder: "Decoder") -> str:
    """Say in what precision a decoder computes, whether it is compiled, and why."""
    return f"{decoder.precision}, {'compiled' if decoder.compiled else 'not compiled'} ({decoder.reason})"
