"""Transformer-XL: a language model that reads a stream of any length with a memory of fixed size.

    import transformer_xl as txl

    model, tokenizer = txl.load("runs/quickstart")
    for token_id in txl.generate(model, tokenizer.encode("def "), max_new_tokens=100):
        ...

Public names are imported when they are first used, so that `import transformer_xl` and `txl --help` stay fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformer_xl.version import __version__ as __version__

if TYPE_CHECKING:
    from transformer_xl.batch import Order, Rows
    from transformer_xl.checkpoint.run_directory import load
    from transformer_xl.config.model import LstmConfig, TransformerXLConfig, VanillaConfig, XLNetConfig
    from transformer_xl.config.recipes import load_recipe
    from transformer_xl.config.run import RunConfig
    from transformer_xl.conversion.convert import convert
    from transformer_xl.data.labels import Example
    from transformer_xl.data.prepare import prepare
    from transformer_xl.errors import TxlError
    from transformer_xl.explain.attribution import attribute
    from transformer_xl.generation.beam import beam_search
    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.generation.draft import Draft
    from transformer_xl.generation.generate import generate
    from transformer_xl.generation.sampling import Sampling
    from transformer_xl.generation.scheduler import Scheduler
    from transformer_xl.inference.reader import Reader
    from transformer_xl.model.attention.block import AttentionKind
    from transformer_xl.model.attention.kinds import register_attention
    from transformer_xl.model.base import LanguageModel
    from transformer_xl.model.body import TransformerXLBody
    from transformer_xl.model.call import Execution, ModelOutput
    from transformer_xl.model.kinds import register_model
    from transformer_xl.model.lstm import Lstm
    from transformer_xl.model.memory import Mems
    from transformer_xl.model.task_model import TaskModel
    from transformer_xl.model.transformer_xl import TransformerXL
    from transformer_xl.model.vanilla import Vanilla
    from transformer_xl.model.xlnet import XLNet
    from transformer_xl.reading.cache import Cache
    from transformer_xl.reading.dynamic import Dynamic
    from transformer_xl.reading.evaluation import evaluate
    from transformer_xl.tasks.predict import predict
    from transformer_xl.training.finetune import finetune
    from transformer_xl.training.run import train

_NAMES = {
    "batch": "Order Rows",
    "checkpoint.run_directory": "load",
    "config.model": "LstmConfig TransformerXLConfig VanillaConfig XLNetConfig",
    "config.recipes": "load_recipe",
    "config.run": "RunConfig",
    "conversion.convert": "convert",
    "data.labels": "Example",
    "data.prepare": "prepare",
    "errors": "TxlError",
    "explain.attribution": "attribute",
    "generation.beam": "beam_search",
    "generation.decoder": "Decoder",
    "generation.draft": "Draft",
    "generation.generate": "generate",
    "generation.sampling": "Sampling",
    "generation.scheduler": "Scheduler",
    "model.attention.block": "AttentionKind",
    "model.attention.kinds": "register_attention",
    "model.body": "TransformerXLBody",
    "model.call": "Execution ModelOutput",
    "model.base": "LanguageModel",
    "model.kinds": "register_model",
    "model.lstm": "Lstm",
    "model.memory": "Mems",
    "inference.reader": "Reader",
    "model.task_model": "TaskModel",
    "model.transformer_xl": "TransformerXL",
    "model.vanilla": "Vanilla",
    "model.xlnet": "XLNet",
    "tasks.predict": "predict",
    "reading.cache": "Cache",
    "reading.dynamic": "Dynamic",
    "reading.evaluation": "evaluate",
    "training.finetune": "finetune",
    "training.run": "train",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AttentionKind", "Cache", "Decoder", "Draft", "Dynamic", "Example", "Execution", "LanguageModel", "Lstm", "LstmConfig",
    "Mems", "ModelOutput", "Order", "Reader", "Rows", "RunConfig", "Sampling", "Scheduler", "TaskModel",
    "TransformerXL", "TransformerXLBody", "TransformerXLConfig", "TxlError", "Vanilla", "VanillaConfig", "XLNet",
    "XLNetConfig", "attribute", "beam_search", "convert", "evaluate", "finetune", "generate", "load", "load_recipe", "predict",
    "prepare", "register_attention", "register_model", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'transformer_xl' has no attribute '{name}'")
    return getattr(importlib.import_module(f"transformer_xl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
