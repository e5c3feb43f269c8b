"""`txl seal`."""

from pathlib import Path

from transformer_xl.console import say


def seal(path: Path, /) -> None:
    """Accept a run's settings and tokenizer, or a whole saved model, as they are now on disk.

    A run and a saved model are sealed: if config.json, tokenizer.json or the
    weights change, they are refused. After you have changed one on purpose,
    this command says what is different, and seals it as it is.

    Common uses:
        txl seal runs/mine
        txl seal exported

    Args:
        path: a run, or the directory of a saved model.
    """
    from transformer_xl.checkpoint.sealing import seal_again

    found = seal_again(path)
    for line in found:
        say(line)
    say(f"sealed '{path}'" if found else f"'{path}' is as it was sealed")
