"""Writes a model for others: as a native directory, or in the format of Hugging Face or of the authors; with its card."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.config.model import SEGMENT, TransformerXLConfig, XLNetConfig, read_config, read_segment
from transformer_xl.config.run import TrainConfig
from transformer_xl.conversion.destination import check_free, new_directory
from transformer_xl.conversion.key_maps import authors, huggingface, pytorch, xlnet_huggingface
from transformer_xl.conversion.vocabulary import to_vocab_state
from transformer_xl.errors import CheckpointError, ConfigError, TokenizerError, counted
from transformer_xl.files import write_file
from transformer_xl.hub import CARD_FILE, model_card
from transformer_xl.model.build import make_model
from transformer_xl.model.pretrained import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, config_values, open_model, write_settings
from transformer_xl.model.task_model import TaskModel
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.xlnet import XLNet
from transformer_xl.tensor_file import TensorSpec, encode_lazily, encode_tensors
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.version import __version__

Target = Literal["native", "huggingface", "authors"]

COMPATIBLE: dict[str, Any] = {
    "attention": "transformer_xl",
    "activation": "relu",
    "final_norm": False,
    "gate": "sum",
    "layer_norm_epsilon": 1e-5,
    "ngram_rows": (),
    "proj_same_dim": True,
    "same_length_besides_self": False,
    "shift": "none",
    "untie_r": False,
    "zero_first_memory": False,
}
"""Settings of models that all foreign targets can express; each target can express some others, too."""

_LOADING = {
    "native": 'import transformer_xl as txl\n\nmodel, tokenizer = txl.load("{name}")',
    "huggingface": 'from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained("{name}")',
    "authors": (
        "import json\n\nimport safetensors.torch\nfrom mem_transformer import MemTransformerLM\n\n"
        'model = MemTransformerLM(**json.load(open("{name}/arguments.json")))\n'
        'model.load_state_dict(safetensors.torch.load_file("{name}/model.safetensors"))'
    ),
}
_TRAINING = """
## Training

{facts}

## License

None is stated. If you own the model, add a line `license:` to the head of this file; mind the rights in the text.
"""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    kind: Target
    n_parameters: int
    notes: tuple[str, ...]  # differences in the other program, one line each


def export(source: str | Path, destination: str | Path, *, kind: Target, tgt_len: int | None = None) -> Exported:
    """Write a model, with a card, for `load`, for Hugging Face, or for the authors' PyTorch code.

    Native: `config.json`, `model.safetensors`, `tokenizer.json`. Hugging Face (TransfoXL of transformers before 4.38; XLNet):
    the first two, `vocab.txt`, `tokenizer_config.json`. Authors: `arguments.json`, which `MemTransformerLM` takes,
    `model.safetensors`, which its `load_state_dict` takes, and `vocab.txt`. Nothing is pickled.

    Args:
        source: a run, a native directory or a hub id.
        destination: a directory that does not exist yet, or is empty.
        kind: the program to write for.
        tgt_len: tokens of a training segment, which all settings have a place for: native, `open_run` reads with it; elsewhere
            only the shape of a table of learned positions depends on it. None: a run's own.
    """
    target = Path(destination)
    check_free(target)
    if kind == "native":
        model, tokenizer = load(source)
        foreign, architecture = None, ""
    else:
        model, tokenizer = load_model(source, kinds=(TransformerXLConfig.kind, XLNetConfig.kind))
        is_xlnet = model.config.kind == XLNetConfig.kind
        if model.config.head is not None and not is_xlnet:
            raise CheckpointError(f"'{source}' is fine-tuned; only an xlnet is exported with its head")
        foreign = (_xlnet if is_xlnet else _transformer_xl)(model, kind, _segment(source, tgt_len))
        (architecture,) = foreign.settings.get("architectures", [""])
    code = _LOADING[kind].format(name=target.name, architecture=architecture)
    library = "transformers" if kind == "huggingface" else "transformer_xl"
    training = "" if tokenizer is None else _training(source, tokenizer.kind)
    card = model_card(model, name=target.name, load=code, library=library, training=training)
    with new_directory(target) as folder:
        write_file(folder / CARD_FILE, [card.encode()])
        if foreign is None:
            weights = write_file(folder / WEIGHTS_FILE, encode_tensors(model.state_dict()))
            length = _segment(source, tgt_len)
            write_settings(folder, config_values(model.config) | ({SEGMENT: length} if length else {}), weights, tokenizer)
            notes = []
        else:
            write_file(folder / "model.safetensors", encode_lazily(foreign.content, foreign.make))
            write_file(folder / foreign.settings_file, [json.dumps(foreign.settings, indent=2).encode() + b"\n"])
            notes = [*foreign.notes, *foreign.write_vocabulary(folder, tokenizer)]
    return Exported(kind, sum(tensor.numel() for tensor in model.state_dict().values()), tuple(notes))


def _training(source: str | Path, unit: str) -> str:
    """Return what a run says of its training, as Markdown; nothing if the source is no run. `unit` is what a token is."""
    run = RunDirectory(source)
    if not run.holds_run:
        return ""
    config, checkpoint = run.config(), run.store().load_best(on_damaged=lambda _: None)  # `load` has told
    data, base = (config.data.corpus, config.base) if config.task is None else (config.task.data, config.task.base)
    facts = [f"text: `{Path(data).name}`, read as {unit} tokens"]  # where it lies is nobody's business
    if config.task is not None:
        facts.append(f"task: {config.task.kind}")
    if base:
        facts.append(f"begun with the weights of `{Path(base).name}`")
    match checkpoint.state:
        case {"tokens": int(tokens)}:
            facts.append(
                f"training: {counted(checkpoint.step, 'step')}, {tokens:,} tokens in all, in segments of {config.train.tgt_len}"
            )
    match checkpoint.state:
        case {"record": {"best": {"loss": float(nats), "step": step}}} if step == checkpoint.step and not config.model.head:
            which = f" (at most the first {most:,} tokens)" if (most := config.eval.max_tokens) else ""
            facts.append(f"validation split{which}: {nats:.4f} nats per {config.predicts}")
    facts.append(f"program: transformer_xl {__version__}, settings of `{config.name}`")
    return _TRAINING.format(facts="\n".join(f"- {fact}" for fact in facts))


def _segment(source: str | Path, tgt_len: int | None) -> int | None:
    """Return the length of a training segment: what the user says, or else a run or its export."""
    run, settings = RunDirectory(source), Path(source) / CONFIG_FILE
    if tgt_len is None and run.holds_run:
        return run.config().train.tgt_len
    return read_segment(settings) if tgt_len is None and settings.is_file() else tgt_len


@dataclass(frozen=True)
class _Foreign:
    """A model as another program has it."""

    settings_file: str  # name of the file of its settings
    settings: dict[str, Any]  # what this file holds
    content: dict[str, TensorSpec]  # types and shapes of all tensors
    make: Callable[[str], Tensor]  # makes one of them
    notes: tuple[str, ...]  # differences in the other program
    # writes files of the vocabulary, and yields differences
    write_vocabulary: Callable[[Path, Tokenizer | None], Iterable[str]]


def _transformer_xl(model: TransformerXL, kind: Target, tgt_len: int | None) -> _Foreign:
    """Return a Transformer-XL as it goes to another program."""
    config = model.config
    _check(config, kind)
    content, make = _foreign_tensors(model, kind)
    settings_file, settings = "config.json", huggingface.values_of(config, tgt_len=tgt_len)
    if kind == "authors":
        settings_file = "arguments.json"
        settings = authors.flags_of(config, tgt_len=TrainConfig.model_fields["tgt_len"].default if tgt_len is None else tgt_len)
    vocabulary = partial(_write_vocabulary, kind=kind)
    return _Foreign(settings_file, settings, content, make, tuple(_notes(config, kind)), vocabulary)


def _xlnet(model: XLNet | TaskModel, kind: Target, tgt_len: int | None) -> _Foreign:
    """Return an XLNet, fine-tuned or not, as it goes to Hugging Face, which has no place for `tgt_len`."""
    config = cast("XLNetConfig", model.config)
    if kind != "huggingface":
        raise CheckpointError("an xlnet is written for Hugging Face only; use --to huggingface")
    own = {"pre_lnorm": config.pre_lnorm, "final_norm": config.final_norm}
    obstacles = [f"model.{name}=True (only False)" for name, is_set in own.items() if is_set]
    if config.n_head * config.d_head != config.d_model:
        obstacles.append(f"model.d_head={config.d_head} (only d_model / n_head, {config.d_model / config.n_head:g})")
    if obstacles:
        raise CheckpointError(f"Hugging Face's XLNet cannot express {', '.join(obstacles)}")
    key_map = xlnet_huggingface.key_map(config)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if not config.untie_r:  # there, each layer has its own
        shared = [name for name in weights if name.removeprefix("backbone.") in ("r_w_bias", "r_r_bias", "r_s_bias")]
        weights |= {name: weights[name].expand(config.n_layer, -1, -1) for name in shared}
    parts = [part for part in key_map.parts() if config.head is None or not part.optional]  # its models have one head
    content = {part.name: TensorSpec(model.dtype, tuple(part.shape)) for part in parts}
    notes = list(_notes_of_head(config))
    if config.zero_first_memory and config.mem_len:
        notes.append(
            "this model begins every stream after mem_len zero vectors that it attends to; Hugging Face begins without memory: "
            "give its first call mems of zeros"
        )
    if config.dropatt != config.dropout:
        notes.append(
            f"Hugging Face's XLNet has one rate of dropout; there, dropatt ({config.dropatt}) is {config.dropout}, too"
        )

    def make(name: str) -> Tensor:
        return key_map.foreign(name, weights.__getitem__).to(model.dtype)

    return _Foreign("config.json", xlnet_huggingface.values_of(config), content, make, tuple(notes), _no_pieces)


def _notes_of_head(config: XLNetConfig) -> Iterator[str]:
    head = config.head
    if head is None:
        return
    yield "what predicts tokens (lm_loss) was left out, because Hugging Face's fine-tuned models lack it"
    if config.mem_len:
        yield (
            f"this model reads a text longer than head.tgt_len ({head.tgt_len} tokens) segment by segment with memory; Hugging "
            "Face's reads what it is given at once"
        )
    if head.in_documents:
        yield "this model reads a row of a document after those before it; to Hugging Face's, give the `mems` of the row before"
    if head.summary == "mean":
        yield "Hugging Face's mean of all states counts padding, this model's does not; there, give it texts of one length"


def _no_pieces(folder: Path, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Say that there is no file of pieces."""
    if tokenizer is None:
        yield "no vocabulary was written: the model has no tokenizer"
    else:
        yield "no vocabulary was written, because Hugging Face reads a spiece.model; if the model came with one, put it there"


def _foreign_tensors(model: TransformerXL, kind: Target) -> tuple[dict[str, TensorSpec], Callable[[str], Tensor]]:
    """Return types and shapes of all foreign tensors, and a function that makes one of them."""
    config = model.config
    key_map = (huggingface if kind == "huggingface" else authors).key_map(config)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    # the authors' `load_state_dict` needs all names of tied weights; Hugging Face ties them itself
    parts = {name: part for part in key_map.parts() for name in (part.name, *(part.aliases if kind == "authors" else ()))}
    content = {name: TensorSpec(model.dtype, tuple(part.shape)) for name, part in parts.items()}
    fixed: dict[str, Tensor] = {}
    if not pytorch.attention_names(config).has_table:  # their modules store the frequencies of the sinusoids with the weights
        prefix = "transformer." if kind == "huggingface" else ""
        fixed[f"{prefix}pos_emb.inv_freq"] = 1 / 10000 ** (torch.arange(0.0, config.d_model, 2.0) / config.d_model)
    content |= {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in fixed.items()}

    def make(name: str) -> Tensor:
        return fixed[name] if name in fixed else key_map.foreign(parts[name].name, weights.__getitem__).to(model.dtype)

    return content, make


def load_model(source: str | Path, *, kinds: Collection[str] = (TransformerXLConfig.kind,)) -> tuple[Any, Tokenizer | None]:
    """Load a model of one of these kinds, and its tokenizer where there is one."""
    folder, tokenizer = Path(source), None
    if folder.is_dir() and not RunDirectory(source).holds_run and not (folder / TOKENIZER_FILE).exists():
        model = open_model(make_model, read_config(folder / CONFIG_FILE), folder)
    else:
        model, tokenizer = load(source)
    if model.config.kind not in kinds:
        known = " or ".join(kinds)
        raise ConfigError(f"'{source}' is a model of kind '{model.config.kind}'; only a {known} can be exported")
    return model, tokenizer


def _check(config: TransformerXLConfig, kind: Target) -> None:
    """Refuse a model that the other program cannot express, with all that stands in the way."""
    expressed = {"proj_same_dim"} if config.div_val == 1 else set()  # it has no effect
    expressed |= set() if config.same_length else {"same_length_besides_self"}
    if kind == "huggingface":
        expressed |= {"layer_norm_epsilon", "untie_r", "zero_first_memory"}
    elif config.attention in pytorch.ATTENTION:
        expressed |= {"attention"}
    own = {name: getattr(config, name) for name in COMPATIBLE if name not in expressed}
    obstacles = [f"model.{name}={own[name]} (only {COMPATIBLE[name]})" for name in own if own[name] != COMPATIBLE[name]]
    if obstacles:
        program = "Hugging Face's TransfoXL" if kind == "huggingface" else "the authors' PyTorch code"
        raise CheckpointError(f"{program} cannot express {', '.join(obstacles)}; txl train --compatible trains what it can")


def _notes(config: TransformerXLConfig, kind: Target) -> Iterator[str]:
    if config.same_length_besides_self:
        yield "with same_length, a query of this model sees mem_len keys besides its own; there, its own is one of them"
    if kind == "huggingface" and not config.zero_first_memory:
        yield (
            "Hugging Face begins every stream after mem_len zero vectors that it attends to, which this model does not know: "
            "the first mem_len tokens will score otherwise"
        )
    if kind == "authors" and config.mem_len and not pytorch.attention_names(config).begins_memory:
        fails = f"the authors' code fails to begin a memory with attention '{config.attention}'"
        yield f"{fails}; call its reset_length with mem_len 0 first"


def _write_vocabulary(folder: Path, tokenizer: Tokenizer | None, *, kind: Target) -> Iterator[str]:
    """Write `vocab.txt`, and for Hugging Face its settings; yield the differences in the other program."""
    if tokenizer is None:
        yield "no vocabulary was written: the model has no tokenizer"
        return
    try:
        state = to_vocab_state(tokenizer)
    except TokenizerError as error:
        yield f"no vocabulary was written: {error}"
        return
    words = state["idx2sym"]
    if any(word.split() != [word] for word in words):
        yield "no vocabulary was written: some of its words are or contain spaces, which vocab.txt cannot hold"
        return
    write_file(folder / "vocab.txt", ["\n".join(words).encode() + b"\n"])
    lower_case, language = state["lower_case"], state.get("language")
    if kind == "authors":
        if lower_case:
            yield "the words of vocab.txt are in lower case: give the authors' Vocab lower_case=True"
        return
    settings = {"tokenizer_class": "TransfoXLTokenizer", "lower_case": lower_case, "delimiter": state["delimiter"]}
    settings |= {name: state[name] for name in ("language", "never_split") if name in state}
    write_file(folder / "tokenizer_config.json", [json.dumps(settings, indent=2).encode() + b"\n"])
    if not {"<unk>", "<UNK>"} & set(words):
        yield (
            "the model loads in Hugging Face's program, but its TransfoXLTokenizer does not, because vocab.txt has no word "
            "'<unk>'; there, make ids yourself: that of a word is its line in vocab.txt, counted from 0"
        )
    elif language is None:
        yield "Hugging Face's tokenizer splits text by Moses rules, which this model's does not; give it text of prepared words"
