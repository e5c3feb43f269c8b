"""`txl generate`."""

import hashlib
import json
import os
import reprlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from transformer_xl.cli.prompts import STDIN, beginning, from_file, is_piped, many, nothing, typed
from transformer_xl.cli.showing import JsonPrinter, ReadingBar, StreamPrinter, TextPrinter, gathered_output, say
from transformer_xl.errors import room_for
from transformer_xl.generation.requests import Prompt

if TYPE_CHECKING:
    from transformer_xl.data.tokenizers import Tokenizer
    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.model.language_model import LanguageModel

_PROMPT = Group("What to go on from", sort_key=1)
_LENGTH = Group("How much to write", sort_key=2)
_CHOICE = Group("How tokens are chosen", sort_key=3)
_OUTPUT = Group("What is printed", sort_key=4)
_MEMORY = Group("Memory", sort_key=5)
_MACHINE = Group("Model and machine", sort_key=6)


def _repeated(group: Group) -> Parameter:
    return Parameter(group=group, negative="", consume_multiple=False, allow_leading_hyphen=True)


_DEFAULT_ROWS = 8
"""Texts written side by side: up to so many cost little more than one, for most of the time goes into reading the weights."""

_TRUSTED_MEM_LEN = 16_384
"""Memory that a file is believed to need, unless the model's own is longer: four times the longest of the papers."""

_INTERACTIVE_TOKENS = 20_000
"""About how many tokens a person will let a model write; decides whether compiling pays."""


def generate(
    run: str,
    /,
    *,
    prompt: Annotated[str | None, Parameter(group=_PROMPT, allow_leading_hyphen=True)] = None,
    prompt_file: Annotated[Path | None, Parameter(group=_PROMPT, allow_leading_hyphen=True)] = None,
    prompts: Annotated[Path | None, Parameter(group=_PROMPT, allow_leading_hyphen=True)] = None,
    interactive: Annotated[bool, Parameter(group=_PROMPT, negative="")] = False,
    tokens: Annotated[int, Parameter(name=["--tokens", "--max-tokens"], group=_LENGTH)] = 500,
    n: Annotated[int, Parameter(name=["--n", "-n"], group=_LENGTH)] = 1,
    stop: Annotated[list[str] | None, _repeated(_LENGTH)] = None,
    stop_token: Annotated[list[str] | None, _repeated(_LENGTH)] = None,
    temperature: Annotated[float, Parameter(group=_CHOICE)] = 0.8,
    top_k: Annotated[int | None, Parameter(group=_CHOICE)] = None,
    top_p: Annotated[float | None, Parameter(group=_CHOICE)] = None,
    min_p: Annotated[float | None, Parameter(group=_CHOICE)] = None,
    repetition_penalty: Annotated[float, Parameter(group=_CHOICE)] = 1.0,
    repetition_window: Annotated[int, Parameter(group=_CHOICE)] = 64,
    bias: Annotated[list[str] | None, _repeated(_CHOICE)] = None,
    seed: Annotated[int | None, Parameter(group=_CHOICE)] = None,
    stream: Annotated[bool | None, Parameter(group=_OUTPUT)] = None,
    echo: Annotated[bool | None, Parameter(group=_OUTPUT)] = None,
    json_: Annotated[bool, Parameter(name="--json", group=_OUTPUT, negative="")] = False,
    logprobs: Annotated[int | None, Parameter(group=_OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(group=_OUTPUT, negative="")] = False,
    memory: Annotated[Path | None, Parameter(group=_MEMORY, metavar="FILE")] = None,
    read_only: Annotated[bool, Parameter(group=_MEMORY, negative="")] = False,
    mem_len: Annotated[int | None, Parameter(group=_MEMORY)] = None,
    batch_size: Annotated[int | None, Parameter(group=_MACHINE)] = None,
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16", "int8"] | None, Parameter(group=_MACHINE)] = None,
    compile: Annotated[Literal["auto", "yes", "no"], Parameter(group=_MACHINE)] = "auto",
    device: Annotated[str, Parameter(group=_MACHINE)] = "auto",
    checkpoint: Annotated[Literal["best", "last", "average"], Parameter(group=_MACHINE)] = "best",
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
        prompt: text to go on from. Default: what is piped in, else a line end.
        prompt_file: take the prompt from this file, as it is; - is standard input. A text of any length is read.
        prompts: many prompts: one a line, or JSON lines {"prompt": TEXT, "seed": NUMBER}; - is standard input.
        interactive: type lines and let the model go on after each; /help says more.
        tokens: how many tokens to write at most.
        n: texts per prompt.
        stop: text that ends the writing and is not part of it; may be repeated.
        stop_token: token that ends the writing: its text or its id; may be repeated.
        temperature: 1 draws as the model believes, lower is safer, 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the likeliest tokens that together have this probability.
        min_p: draw from tokens at least so many times as likely as the likeliest.
        repetition_penalty: above 1 makes tokens that were there less likely.
        repetition_window: how many of the last tokens count as being there.
        bias: TOKEN=NUMBER, added to the score of a token, given by its text or its id; -inf bans it; may be repeated.
        seed: the same seed gives the same text. Default: --memory goes on with its random numbers; else another each time.
        stream: print text as it comes. Default: if there is one; with --json: also a line for each token.
        echo: print the prompt too. Default: if it was typed.
        json_: print a JSON line for each finished text.
        logprobs: with --json: log-probabilities that the model gave to the tokens, and to the N likeliest.
        quiet: no figures at the end, no progress.
        memory: go on from what this file remembers, if there is one, and save there what was read and written.
        read_only: with --memory: leave the file as it is; many texts each go on from it.
        mem_len: positions of memory. Default: as in training, or that of --memory.
        batch_size: texts written side by side. Default: 8, or as many as there are.
        precision: of weights and memory; auto takes fp32 or bf16, what is faster here. Default: fp32, or that of --memory.
        compile: compile the model first, which takes seconds and needs a C++ compiler; auto: for many tokens.
        device: auto, cpu, cuda, cuda:N or mps.
        checkpoint: of a run: the one with the best validation loss, the last, or the last average (train.average).
    """
    _refuse(
        (sum(x is not None for x in (prompt, prompt_file, prompts)) > 1, "--prompt, --prompt-file and --prompts: give one"),
        (tokens < 0, f"--tokens ({tokens}) must be at least 0"),
        (n < 1, f"--n ({n}) must be at least 1"),
        (batch_size is not None and batch_size < 1, f"--batch-size ({batch_size}) must be at least 1"),
        (mem_len is not None and mem_len < 0, f"--mem-len ({mem_len}) must be at least 0"),
        (logprobs is not None and logprobs < 0, f"--logprobs ({logprobs}) must be at least 0"),
        (logprobs is not None and not json_, "--logprobs are printed with --json only; add --json"),
        (n > 1 and temperature == 0, f"--n ({n}) with --temperature 0 writes the same text again and again; leave --n out"),
        (read_only and memory is None, "--read-only says what to do with the FILE of --memory; give one"),
        (
            memory is not None and not read_only and (n > 1 or prompts is not None),
            "--memory remembers one text; with --n or --prompts add --read-only, so that each text goes on from FILE",
        ),
        (interactive and sys.stdin is None, "--interactive needs standard input, which is closed"),
        (
            interactive and (n > 1 or prompts is not None or json_ or stream is False),
            "--interactive writes one text as it comes; leave --n, --prompts, --json and --no-stream out",
        ),
        (
            bool(stream) and not json_ and (n > 1 or prompts is not None),
            "--stream shows one text; with several, leave it out or add --json",
        ),
    )
    from transformer_xl.checkpoint.run_directory import load
    from transformer_xl.generation.job import Interrupts, Job, Printer, StoppedReading
    from transformer_xl.generation.requests import check_seed, fresh_seed
    from transformer_xl.generation.sampling import Sampling
    from transformer_xl.generation.session import TextSession
    from transformer_xl.generation.stopping import Stopping
    from transformer_xl.model.precision import choose_device
    from transformer_xl.world import joined, parts

    def warn(message: str) -> None:
        say(f"warning: {message}", quiet=not world.first)

    with joined() as world:
        drawn = world.from_first(fresh_seed())
        with world.agreed():
            from_stdin = _reads_stdin(prompt, prompt_file, prompts)
            not_divided = f"standard input is not divided among {world.size} processes; give --prompts FILE, or --prompt"
            _refuse((not world.alone and from_stdin, not_divided))
            keeps_drawing = seed is None and not read_only and not interactive  # there, each turn has a seed of its own
            chosen_seed = drawn if seed is None else check_seed(seed)
            remembered = memory is not None and _check_memory(memory, read_only=read_only)
            settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            settings |= {"repetition_penalty": repetition_penalty, "repetition_window": repetition_window}
            Sampling(**settings)  # complain before a large model is loaded
            Stopping(strings=stop or [])
            torch_device = choose_device(device)
            model, tokenizer = load(run, which=checkpoint, on_damaged=warn)
            sampling = Sampling(**settings, logit_bias=_biases(bias or [], tokenizer))
            sampling.check(tokenizer.vocab_size)
            stop_tokens = [_token(given, tokenizer, "--stop-token") for given in stop_token or []]
            stopping = Stopping(strings=stop or [], tokens=stop_tokens)
            stopping.check(tokenizer.vocab_size)
            given = many(prompts, tokenizer) if prompts else _given(prompt, prompt_file, tokenizer, piped=not interactive)
            if not given and not interactive:
                given = [nothing() if remembered else beginning(tokenizer)]
            n_texts = max(1, len(given)) * n
            with_session = interactive or memory is not None
            alone_wanted = f"{world.size} processes divide texts, and this is one; give --prompts or --n, or start one process"
            _refuse((not world.alone and (with_session or n_texts == 1), alone_wanted))
            own = parts(range(n_texts), world)
            their_mem_len, their_precision = (None, None)
            if remembered and memory is not None:
                trusted = max(model.mem_len, mem_len or 0, _TRUSTED_MEM_LEN)
                their_mem_len, their_precision = _read_with(memory, trusted_mem_len=trusted)
            n_rows = 1 if memory is not None else min(batch_size or _DEFAULT_ROWS, max(1, len(own)))
            decoder = _open(
                model.to(torch_device),
                batch_size=n_rows,
                mem_len=_agreed("--mem-len", mem_len, their_mem_len, memory),
                precision=_agreed("--precision", None if precision == "auto" else precision, their_precision, memory)
                or precision
                or "fp32",
                compile={"auto": "auto", "yes": True, "no": False}[compile],
                expected_tokens=_INTERACTIVE_TOKENS if interactive else tokens * (len(own) // n_rows),
            )
            session = TextSession(decoder, tokenizer, keeps_drawing=keeps_drawing) if with_session else None
            if session is not None and memory is not None and remembered:
                session.load(memory)
            kept_seed = session.seed if session is not None and keeps_drawing else None
            if kept_seed is not None:
                chosen_seed = kept_seed
        world.check_same(
            model=model.config.model_dump(mode="json"),
            prompts=hashlib.sha256(b"".join(each.ids.tobytes() + f"|{each.seed}|".encode() for each in given)).hexdigest(),
            options=settings | {"n": n, "tokens": tokens, "seed": chosen_seed, "stop": [stop, stop_token], "bias": bias},
        )
        job = Job(decoder, tokenizer, sampling, stopping, n_tokens=tokens, seed=chosen_seed, n=n, likeliest=logprobs, own=own)
        if session is not None and interactive:
            from transformer_xl.cli.interactive import Conversation

            Conversation(session, job, file=memory, read_only=read_only, quiet=quiet, machine=_machine(decoder)).run(given)
            return
        printer: Printer
        if json_:
            printer = JsonPrinter(tokenizer=tokenizer, stream=bool(stream), logprobs=logprobs is not None)
        elif n_texts > 1 or stream is False:
            printer = TextPrinter(echo=echo, tokenizer=tokenizer, several=n_texts > 1, first=own.start)
        else:
            printer = StreamPrinter(echo=echo, tokenizer=tokenizer)
        try:
            with ReadingBar(sum(len(prompt.ids) for prompt in given), hidden=quiet or n_texts > 1) as bar:
                if session is None or memory is None:
                    with Interrupts() as late, gathered_output(world):  # one that is done waits for the texts of the others
                        interrupted = job.run(given, printer, bar.advance)
                    interrupted = world.any(interrupted or late.noted)
                elif read_only:
                    interrupted = job.ask(session, given, printer, bar.advance)
                else:
                    with Interrupts() as interrupts:  # what was shown is saved, though somebody grew impatient
                        interrupted = job.go_on(session, given[0], printer, bar.advance)
                        session.save(memory)
                        interrupted = interrupted or interrupts.noted
        except StoppedReading:
            say(f"\nstopped reading; {memory} stays as it was", quiet=quiet)
            sys.exit(130)
        line = job.totals.of_all(world).line(_machine(decoder), chosen_seed, interrupted=interrupted)
        say(line if kept_seed is None else f"{line}, gone on with", quiet=quiet or json_ or not world.first)
        if interrupted:
            sys.exit(130)


def _open(model: "LanguageModel", *, batch_size: int, mem_len: int | None, **options: Any) -> "Decoder":
    """Open a decoder, or say what does not fit into memory."""
    from transformer_xl.generation.decoder import Decoder

    texts = f"{batch_size:,} texts side by side" if batch_size > 1 else "a text"
    what = f"{texts}, looking back {mem_len or model.mem_len:,} tokens,"
    with room_for(what, "lower --batch-size or --mem-len"):
        return Decoder(model, batch_size=batch_size, mem_len=mem_len, **options)


def _machine(decoder: "Decoder") -> str:
    """Say in what precision a decoder computes, whether it is compiled, and why."""
    return f"{decoder.precision}, {'compiled' if decoder.compiled else 'not compiled'} ({decoder.reason})"


def _refuse(*complaints: tuple[bool, str]) -> None:
    from transformer_xl.errors import ConfigError

    for wrong, complaint in complaints:
        if wrong:
            raise ConfigError(complaint)


def _reads_stdin(prompt: str | None, prompt_file: Path | None, prompts: Path | None) -> bool:
    """Say whether what to go on from comes from standard input."""
    return STDIN in (prompt_file, prompts) or (prompt is None and prompt_file is None and prompts is None and is_piped())


def _check_memory(file: Path, *, read_only: bool) -> bool:
    """Return whether a session's file exists; complain before anything is read if it could not be loaded or saved."""
    from transformer_xl.errors import CheckpointError

    folder = file.absolute().parent
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise CheckpointError(f"--memory '{file}' is not a file; choose another name")
    if read_only and not file.exists():
        raise CheckpointError(f"--memory '{file}' does not exist; leave --read-only out to begin it")
    if not folder.is_dir():
        raise CheckpointError(f"--memory '{file}': the directory '{folder}' does not exist; make it first")
    if not read_only and not os.access(folder, os.W_OK):
        raise CheckpointError(
            f"--memory '{file}': the directory '{folder}' cannot be written; add --read-only, or save elsewhere"
        )
    return file.exists()


def _read_with(file: Path, *, trusted_mem_len: int) -> tuple[int | None, str | None]:
    """Return memory length and precision that a session was read with, as far as they can be meant.

    Anybody can write a small file that says that it needs a huge memory.
    """
    from transformer_xl.errors import CheckpointError
    from transformer_xl.generation.snapshot import describe_session

    decoder = describe_session(file)["decoder"]
    mem_len, precision = decoder.get("mem_len"), decoder.get("precision")
    mem_len = mem_len if type(mem_len) is int and mem_len >= 0 else None
    if mem_len is not None and mem_len > trusted_mem_len:
        raise CheckpointError(
            f"--memory '{file}' says that it was read with --mem-len {reprlib.repr(mem_len)}, and more than "
            f"{trusted_mem_len:,} is taken over only if it is asked for; if it is meant, give --mem-len too"
        )
    return (mem_len, precision if precision in ("fp32", "bf16", "fp16", "int8") else None)


def _agreed(option: str, given: Any, remembered: Any, file: Path | None) -> Any:
    """Return what a session was read with, unless something else was asked for."""
    from transformer_xl.errors import ConfigError

    if None not in (given, remembered) and given != remembered:
        raise ConfigError(f"{option} ({given}): '{file}' was read with {remembered}; leave {option} out, or start anew")
    return given if remembered is None else remembered


def _given(prompt: str | None, prompt_file: Path | None, tokenizer: "Tokenizer", *, piped: bool) -> list[Prompt]:
    """Return the one prompt that was given, if there was one."""
    if prompt is not None:
        return [typed(prompt, tokenizer)]
    if prompt_file is not None:
        return [from_file(prompt_file, tokenizer)]
    if piped and is_piped():
        read = from_file(STDIN, tokenizer)
        if len(read.ids) == 0:
            say("note: nothing was piped in")
        return [read] if len(read.ids) else []
    return []


def _biases(given: list[str], tokenizer: "Tokenizer") -> dict[int, float]:
    """Read TOKEN=NUMBER."""
    from transformer_xl.errors import ConfigError

    biases = {}
    for each in given:
        token, equals, number = each.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = None
        if not equals or not token or value is None:
            raise ConfigError(f"--bias '{each}' is not TOKEN=NUMBER, such as the=-2.5 or 17=-inf")
        biases[_token(token, tokenizer, "--bias")] = value
    return biases


def _token(given: str, tokenizer: "Tokenizer", option: str) -> int:
    """Return the id of a token, given as such, as its text, or as its text in JSON."""
    from transformer_xl.errors import ConfigError, TokenizerError

    if given.isdecimal():
        return int(given)
    text = given
    if len(given) > 1 and given[0] == given[-1] == '"':
        try:
            text = json.loads(given)
        except ValueError:
            raise ConfigError(f'{option} {given}: not text in JSON; write it as "text", or give the token\'s id') from None
    try:
        ids = tokenizer.encode(text).tolist()
    except TokenizerError as error:
        raise ConfigError(f"{option} {given!a}: {error}") from None
    if len(ids) != 1:
        raise ConfigError(f"{option} {given!a} is {len(ids)} tokens ({ids[:8]}) for this model, not one; give the token's id")
    return ids[0]
