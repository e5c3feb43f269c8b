"""A tiny model with its tokenizer, in memory and in a directory; skipped, visibly, where the extra `hf` is not installed."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_model
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tokenizers.kinds import Tokenizer, train_tokenizer

TEXT = "hello, wörld\nthis is a text of several words\n"


@dataclass(frozen=True)
class Saved:
    model: TransformerXL
    tokenizer: Tokenizer
    path: Path

    def in_transformers(self, **options: Any) -> Any:
        """Load it with transformers; of no class, because type checkers find none that its `generate` accepts."""
        from transformers import AutoModelForCausalLM

        import transformer_xl.huggingface  # noqa: F401  # registers the classes

        return AutoModelForCausalLM.from_pretrained(self.path, **options)


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    logging = pytest.importorskip("transformers.utils.logging", reason="the extra 'hf' is not installed")
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Saved]:
    def save(kind: Any = "char", **changes: Any) -> Saved:
        tokenizer = train_tokenizer(TokenizerConfig(kind=kind), [TEXT])
        model = tiny_model(vocab_size=tokenizer.vocab_size, **changes)
        path = tmp_path / "saved"
        model.save_pretrained(path)
        tokenizer.save(path / "tokenizer.json")
        return Saved(model, tokenizer, path)

    return save


@pytest.fixture
def saved(save: Callable[..., Saved]) -> Saved:
    return save()


def wrapped(**changes: Any) -> Any:
    """A random model behind transformers' interface, in evaluation mode."""
    from transformer_xl.huggingface import TransformerXLForCausalLM, TransformerXLPretrainedConfig

    native = tiny_model(**changes)
    model = TransformerXLForCausalLM(TransformerXLPretrainedConfig(**native.config.model_dump(mode="json"))).eval()
    model.transformer.load_state_dict(native.state_dict())
    return model


@contextmanager
def shapes_read(model: TransformerXL) -> Iterator[list[tuple[int, int]]]:
    """Record the shape of the ids of every reading."""
    seen: list[tuple[int, int]] = []
    handle = model.embedding.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    yield seen
    handle.remove()


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
