"""`txl generate`."""

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer_xl.cli.generate_options import Options
from transformer_xl.cli.lines import check_alone
from transformer_xl.cli.prompts import Prompt, edited_lines
from transformer_xl.console import progress, say
from transformer_xl.errors import counted
from transformer_xl.generation.seeds import fresh_seed
from transformer_xl.process import interrupts

if TYPE_CHECKING:
    from pathlib import Path

    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.cli.job import WritingJob
    from transformer_xl.cli.printers import Printer
    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.generation.session import TextSession

_DEFAULT_ROWS = 8
"""Texts written side by side: this many cost little more than one, because reading the weights takes most of the time."""

_GREETING = "Type text, and the model goes on; an empty line lets it go on as it is. /help lists what else there is."


def generate(run: str, /, *, options: Options = Options()) -> None:
    """Continue a prompt; the text appears as it is generated.

    Common uses:
        txl generate runs/mine --prompt "Once upon a time" --seed 1
        txl generate runs/mine --prompt-file chapter1.txt --tokens 1000 --top-p 0.95
        cat chapter1.txt | txl generate runs/mine --temperature 0
        txl generate runs/mine --prompt "It was" -n 5 --min-p 0.05
        txl generate runs/mine --prompts many.jsonl --json > texts.jsonl
        txl generate runs/mine --prompts many.txt --beams 4 --stop-token "."
        txl generate runs/mine --prompt-file book.txt --tokens 0 --memory book
        txl generate runs/mine --prompt "In the end" --memory book --read-only
        txl generate runs/mine --prompts many.txt --memory book --read-only
        txl generate runs/mine --interactive --memory diary
        txl generate runs/music --tokens 1000 --out piece.npy

    Each of several texts has its own seed, derived from --seed and printed with
    it. With that seed the text can be generated again alone.

    Ctrl-C ends all texts that have begun and prints them; a second one aborts.
    With --memory, what was read and shown so far is saved, unless the prompt is
    still being read or you press Ctrl-C again.

    Args:
        run: directory of a run, of an exported model, or a hub id.
        options: all others.
    """
    check_alone("txl generate")
    source, remembered = options.source, options.remembered
    if options.beam.beams is not None:
        sys.exit(130 if _search(run, options, options.beam.beams) else 0)
    file = remembered.existing_file()
    if source.interactive:
        with edited_lines():
            say(_GREETING, quiet=options.output.quiet)
            with interrupts() as received:  # which an import may swallow
                from transformer_xl.cli.interactive import Conversation  # with PyTorch: a second, in which a person may type
            if received:
                raise KeyboardInterrupt
            task = _prepare(run, options, file)
            assert task.session is not None
            Conversation(task.session, task.job, remembered, quiet=options.output.quiet).run(task.prompts)
    elif _write(options, _prepare(run, options, file)):
        sys.exit(130)


@dataclass(frozen=True)
class _Task:
    """Texts to write, and what writes them.

    Text k draws with `text_seed(seed, prompt, sample)`: `WritingJob._drafts` tells prompt and sample from k, `Draft` makes a
    generator of it, and a session that goes on drawing takes its own instead (`TextState.draw`).
    """

    prompts: list[Prompt]
    job: "WritingJob"
    session: "TextSession | None"  # remembers what is read and written; None: nothing does
    goes_on_drawing: bool  # random numbers go on from where the session's file left them


def _prepare(run: str, options: Options, file: "Path | None") -> _Task:
    """Open the model and read the prompts; `file` is the session's, if it exists."""
    from transformer_xl.cli.job import WritingJob
    from transformer_xl.generation.session import TextSession

    source, length, remembered = options.source, options.length, options.remembered
    seed = fresh_seed() if options.choice.seed is None else options.choice.seed
    opened = options.opening.open(run)
    sampling, stopping = options.choice.sampling(opened.tokenizer), length.stopping(opened.tokenizer)
    prompts = source.read(opened.tokenizer, continues=file is not None)
    decoder = _open_decoder(options, opened, file, n_text=max(1, len(prompts)) * length.n)
    session, goes_on_drawing = None, False
    if source.interactive or remembered.memory is not None:
        # each turn of a conversation has a seed of its own
        keeps_drawing = options.choice.seed is None and not remembered.read_only and not source.interactive
        session = TextSession(decoder, opened.tokenizer, keeps_drawing=keeps_drawing)
        if file is not None:
            session.load(file)
        if keeps_drawing and session.text.random is not None:
            seed, goes_on_drawing = session.text.random[0], True
    job = WritingJob(
        decoder,
        opened.tokenizer,
        sampling,
        stopping,
        n_tokens=length.tokens,
        seed=seed,
        n=length.n,
        likeliest=options.output.logprobs,
    )
    return _Task(prompts, job, session, goes_on_drawing)


def _open_decoder(options: Options, opened: "Opened", file: "Path | None", *, n_text: int) -> "Decoder":
    """Open a decoder for `n_text` texts, with the settings of the session's file; say what does not fit into memory."""
    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.generation.fastest import keep_compiled_code

    keep_compiled_code()
    mem_len, precision = options.remembered.mem_len, options.machine.precision
    if file is not None:
        mem_len, precision = options.remembered.agreed(file, precision)
    at_once = 1 if options.remembered.memory is not None else min(options.machine.batch_size or _DEFAULT_ROWS, n_text)
    n_row = at_once * (options.beam.beams or 1)
    return Decoder(
        opened.model,
        batch_size=n_row,
        mem_len=mem_len,
        precision=precision or "fp32",
        compile={"auto": False if options.source.interactive else "auto", "yes": True, "no": False}[options.machine.compile],
        expected_tokens=options.length.tokens * (n_text // at_once),
        on_compile=lambda: say("compiling the model; this takes some seconds", quiet=options.output.quiet),
    )


def _search(run: str, options: Options, beams: int) -> bool:
    """Search for the likeliest texts, and print them; return whether it was interrupted."""
    from transformer_xl.cli.printers import BeamPrinter, describe_decoder
    from transformer_xl.generation.beam import Hypothesis, beam_search

    output, length, penalty = options.output, options.length, options.beam.length_penalty
    opened = options.opening.open(run)
    tokenizer = opened.tokenizer
    stop, banned = length.stopping(tokenizer).tokens, options.choice.sampling(tokenizer).logit_bias
    prompts = options.source.read(tokenizer, continues=False)
    decoder = _open_decoder(options, opened, None, n_text=len(prompts))
    printer = BeamPrinter(prompts, tokenizer, n=length.n, echo=output.echo, as_json=output.json_)
    n_found, begin, shows = 0, time.perf_counter(), sys.stdout.isatty() or len(prompts) == 1
    with interrupts() as received, progress("searching", len(prompts), unit="texts", hidden=output.quiet or shows) as bar:

        def on_found(number: int, found: list[Hypothesis]) -> None:
            nonlocal n_found
            n_found += 1
            printer.found(number, found)
            bar.advance()

        beam_search(
            decoder,
            [prompt.ids for prompt in prompts],
            beams=beams,
            max_new_tokens=length.tokens,
            n=length.n,
            stop_tokens=stop,
            banned_tokens=banned,
            length_penalty=1.0 if penalty is None else penalty,
            on_found=on_found,
            interrupted=lambda: bool(received),
        )
    printer.end()
    seconds = time.perf_counter() - begin
    what = f"{counted(n_found, 'prompt')} with {counted(beams, 'beam')}"
    line = f"searched for {what} in {seconds:.2f} s ({seconds / max(n_found, 1):.3f} s each)"
    line = f"{'interrupted; ' if received else ''}{line}; {describe_decoder(decoder)}"
    say(line, quiet=output.quiet or output.json_)
    return bool(received)


def _write(options: Options, task: _Task) -> bool:
    """Write and print the texts; return whether it was interrupted."""
    from transformer_xl.cli.printers import describe_decoder, print_events

    output, memory = options.output, options.remembered.memory
    prompts, job, session = task.prompts, task.job, task.session
    n_token, hidden = sum(len(prompt.ids) for prompt in prompts), output.quiet or len(prompts) * job.n > 1
    with interrupts() as received:  # what was shown is saved even after Ctrl-C
        printer = _printer(options, task)
        if session is None or memory is None:
            print_events(job.run(prompts, received), printer, n_token, hidden=hidden)
        elif options.remembered.read_only:
            print_events(job.run(prompts, received, session, apart=True), printer, n_token, hidden=hidden)
        else:
            if print_events(job.run(prompts[:1], received, session), printer, n_token, hidden=hidden):
                say(f"\nstopped reading; {memory} stays as it was", quiet=output.quiet)
                return True
            session.save(memory)
    line = job.totals.line(describe_decoder(job.decoder), job.seed, interrupted=bool(received))
    if task.goes_on_drawing and job.totals.n_written:
        line += ", continued"
    if session is not None and memory is not None and not options.remembered.read_only:
        line += f"; {counted(session.text.n_tokens, 'token')} saved to {memory}"
    say(line, quiet=output.quiet or output.json_)
    return bool(received)


def _printer(options: Options, task: _Task) -> "Printer":
    from transformer_xl.cli.printers import FilePrinter, JsonPrinter, StreamPrinter, TextPrinter, echoed

    output, prompts, job = options.output, task.prompts, task.job

    def beginning(number: int) -> str:
        return echoed(prompts[number // job.n], output.echo, job.tokenizer)

    is_one = len(prompts) * job.n == 1
    if output.out is not None:
        return FilePrinter(output.out)
    if output.json_:
        return JsonPrinter(prompts, job.n, job.tokenizer, stream=bool(output.stream), logprobs=output.logprobs is not None)
    if is_one and output.stream is not False:
        return StreamPrinter(beginning(0))
    return TextPrinter(beginning, several=not is_one)
