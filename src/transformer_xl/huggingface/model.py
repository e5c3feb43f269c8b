"""Our models behind the methods that transformers calls: here the one that predicts tokens, in `tasks.py` the fine-tuned ones.

Where our model and transformers differ, it follows transformers: `labels` are the `input_ids` (shifted inside), `loss` is one
mean, and `attention_mask` marks padding. Callers pass the memory as `mems`, and `generate` passes it as a `MemoryCache`.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.generic import ModelOutput
from transformers.utils.hub import cached_file

from transformer_xl.batch import Rows
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.files import record_of
from transformer_xl.huggingface.cache import MemoryCache
from transformer_xl.huggingface.config import TransformerXLPretrainedConfig
from transformer_xl.huggingface.legacy import download_arguments, native_source
from transformer_xl.manifest import MANIFEST_FILE
from transformer_xl.model.build import make_model
from transformer_xl.model.memory import Mems
from transformer_xl.model.pretrained import WEIGHTS_FILE, check_finite, fitting_blueprint, manifest_of
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tensor_file import TensorFile

PREFILL = 128  # tokens of a prompt read at once, as `Decoder` does; the memory carries what was before

MANY_TOKENS = 1 << 15
"""Larger vocabularies, and those in clusters, score labels without logits; call the model without labels to get them."""

_PREFIX = "transformer."


@dataclass
class TransformerXLCausalLMOutput(ModelOutput):
    """What a forward pass returns.

    Attributes:
        loss: nats per scored token, a mean; only with labels.
        logits: (B, T, V), scores of the token that follows each position (log-probabilities with an adaptive softmax). None
            with labels if there are clusters or many tokens, because labels are then scored without the whole vocabulary.
        mems: the memory after the segment; None with `use_cache=False`, or if a cache carries it.
        cache: the cache of the call, advanced.
        hidden_states: with `output_hidden_states`, what enters each layer, embeddings first, and what the softmax reads, each
            (B, T, D).
        attentions: with `output_attentions`, of each layer how much its heads attend from each token to the keys, memory first,
            fp32 (B, N, T, M + T), without a graph.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mems: Mems | None = None
    cache: MemoryCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class TransformerXLModelOutput(ModelOutput):
    """What the layers make of a segment.

    Attributes:
        last_hidden_state: (B, T, D), what the softmax reads.
        mems: the memory after the segment; None with `use_cache=False`.
        hidden_states: see `TransformerXLCausalLMOutput`.
        attentions: see `TransformerXLCausalLMOutput`.
    """

    last_hidden_state: Tensor | None = None
    mems: Mems | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class TransformerXLPreTrainedModel(PreTrainedModel):
    """A model of ours that transformers can load, save and train; its subclasses are what `Auto…` classes find.

    Args:
        config: `vocab_size` must be set.

    Attributes:
        transformer: the model of ours.
    """

    config_class = TransformerXLPretrainedConfig
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    gives: ClassVar[tuple[str | None, ...]]
    """Kinds of heads that the class is for; None: no head."""

    def __init__(self, config: TransformerXLPretrainedConfig) -> None:
        super().__init__(config)
        _check_head(config, self.gives, "this config")
        self.transformer: Any = make_model(config.native)
        self.register_load_state_dict_pre_hook(_with_prefix)
        self.get_input_embeddings().register_forward_pre_hook(self._without_padding)
        self.post_init()

    def _without_padding(self, _: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        """Let libraries look up padding, too, which has no vector: it gets that of the first id, and is never seen."""
        return (given[0].masked_fill(given[0] == self.config.vocab_size, 0),)

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass  # our model has drawn its own

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Any:
        """Load as `PreTrainedModel.from_pretrained` does, but only safetensors whose every tensor fits; old `transfo-xl`, too.

        Raises:
            CheckpointError: a tensor is missing, unexpected, of another shape, or not finite.
        """
        if source is not None:  # None: the caller gives a config and weights
            source = native_source(source, kwargs)
            _check_file(source, kwargs, cls)
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = super().from_pretrained(source, *args, **kwargs)
        model, info = loaded
        for kind in ("missing", "unexpected", "mismatched"):
            for name in sorted(map(str, info[f"{kind}_keys"])):
                raise CheckpointError(f"'{source}': tensor {name} is {kind}, by its config; not the same model?")
        check_finite(model.transformer, str(source))
        return (model, info) if wants_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        weights = self.state_dict() if state_dict is None else state_dict
        weights = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
        (Path(save_directory) / MANIFEST_FILE).unlink(missing_ok=True)  # of what is replaced
        super().save_pretrained(save_directory, is_main_process, weights, *args, **kwargs)

    def _read(
        self,
        ids: Tensor | None,
        vectors: Tensor | None,
        mask: Tensor | None,
        mems: Mems | None,
        attentions: bool | None,
        hidden_states: bool | None,
    ) -> "Segment":
        """Read a segment; the arguments are those of `TransformerXLForCausalLM.forward`."""
        given = _tokens(ids, vectors, self.transformer)
        config, model = self.config, self.transformer
        # no vector is padding by itself
        of_id = torch.zeros(given.shape[:2], dtype=torch.int64, device=given.device) if ids is None else ids
        padding = Padding.of(real_tokens(of_id, mask, config.vocab_size, continued=mems is not None))
        model.check_segment(of_id, mems)
        hidden_states = config.output_hidden_states if hidden_states is None else hidden_states
        attentions = config.output_attentions if attentions is None else attentions
        states: list[Tensor] = []
        weights: list[Tensor] = []
        with model.watched(states=states.append if hidden_states else None, weights=weights.append if attentions else None):
            last, new_mems = model.read(padding.turn(given), mems=mems, rows=Rows(n_pad=padding.n_pad))
        states = [padding.turn_back(h) for h in (*states, last)] if states else []
        weights = [padding.turn_weights_back(w) for w in weights]
        return Segment(last, new_mems, padding, tuple(states) or None, tuple(weights) or None)

    def get_input_embeddings(self) -> torch.nn.Module:
        return getattr(self.transformer, "backbone", self.transformer).embedding

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"the vocabulary ({self.config.vocab_size}) cannot be resized; train with the tokenizer you need")


@dataclass(frozen=True)
class Segment:
    """A segment that was read. Its tokens stand where the caller has them, but in `last`."""

    last: Tensor  # (B, T, D), each row turned until its last token stands at the end
    mems: Mems
    padding: "Padding"
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class TransformerXLModel(TransformerXLPreTrainedModel):
    """A Transformer-XL without its softmax, for those who read its states; `AutoModel` finds it.

    Args:
        config: `vocab_size` must be set.
    """

    gives = (None,)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Mems | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> TransformerXLModelOutput | tuple[Any, ...]:
        """Read one segment after the memory of those before it; see `TransformerXLForCausalLM.forward`."""
        segment = self._read(input_ids, inputs_embeds, attention_mask, mems, output_attentions, output_hidden_states)
        result = TransformerXLModelOutput(
            last_hidden_state=segment.padding.turn_back(segment.last),
            mems=None if use_cache is False else segment.mems,
            hidden_states=segment.hidden_states,
            attentions=segment.attentions,
        )
        return result.to_tuple() if return_dict is False else result


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, GenerationMixin):
    """A Transformer-XL that `Auto…` classes, `generate`, pipelines and `Trainer` of transformers can use.

    Args:
        config: `vocab_size` must be set.

    Attributes:
        transformer: the `TransformerXL`.
    """

    accepts_loss_kwargs = True
    gives = (None,)
    _is_stateful = True  # no assisted decoding, because a memory cannot remove rejected tokens
    _no_split_modules = ["TransformerXL"]  # noqa: RUF012  # in one piece: the softmax reads the embedding's weights

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Mems | None = None,
        cache: MemoryCache | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> TransformerXLCausalLMOutput | tuple[Any, ...]:
        """Read one segment after the memory of those before it.

        Args:
            input_ids: int64 (B, T); the id `vocab_size`, our tokenizer's `<pad>`, is padding wherever it stands.
            attention_mask: (B, T), 0 at padding, which stands at the left or at the right of a row's text. Columns for the
                tokens in the memory may come before.
            mems: what the last call returned; None: nothing was read.
            cache: the same, as a `MemoryCache`, which is advanced.
            labels: int64 (B, T), the same tokens as `input_ids`: they are shifted inside, so the first token of a call is never
                scored. Labels of -100, padding, and tokens after padding are not scored either.
            inputs_embeds: (B, T, D), vectors that stand for `input_ids`, such as `get_input_embeddings()(input_ids)`.
            use_cache: False: return no memory.
            output_attentions: return where the heads look; None: as the config says.
            output_hidden_states: return what the layers read; None: as the config says.
            return_dict: False: return a tuple, without what is None.
            num_items_in_batch: divide the sum of the losses by this instead of the number of scored tokens.

        Returns:
            loss, logits and memory. A padded row gets the same as alone; the output at padding means nothing.

        Raises:
            ValueError: shapes that do not fit, padding between tokens, two memories, ids and vectors, or vectors for a model
                that needs the ids of its tokens.
        """
        mems = _memory(mems, cache)
        segment = self._read(input_ids, inputs_embeds, attention_mask, mems, output_attentions, output_hidden_states)
        padding, model = segment.padding, self.transformer
        targets = None if labels is None else padding.turn(_targets(labels, padding.real), fill=-100)
        h_BTD = model.drop_output(segment.last)
        # score labels without the scores of all tokens if these would take gigabytes
        nll = logits = None
        if targets is not None and (self.config.cutoffs or self.config.vocab_size > MANY_TOKENS):
            nll = model.softmax.nll(h_BTD, targets, model.embedding)
        else:
            logits = model.softmax.logits(h_BTD, model.embedding)
        if cache is not None:
            cache.advance(segment.mems, h_BTD.shape[1])
        result = TransformerXLCausalLMOutput(
            loss=None if targets is None else _loss(nll, logits, targets, num_items_in_batch),
            logits=None if logits is None else padding.turn_back(logits),
            mems=segment.mems if cache is None and use_cache is not False else None,
            cache=cache,
            hidden_states=segment.hidden_states,
            attentions=segment.attentions,
        )
        return result.to_tuple() if return_dict is False else result

    def _counts_from_end(self) -> bool:
        return isinstance(self.transformer, TransformerXL) and self.transformer.attention_kind.counts_from_end

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        mask = model_kwargs.get("attention_mask")
        if mask is not None and bool((mask[:, -1] == 0).any()):
            row = int((mask[:, -1] == 0).nonzero()[0, 0])
            raise ValueError(f"prompt {row} is empty or padded at the right; use tokenizer.padding_side = 'left'")
        # a memory would hold nothing, or states whose positions are no longer right: read the text again instead
        if self.transformer.mem_len == 0 or self._counts_from_end():
            generation_config.use_cache = False
        if generation_config.use_cache is False:
            return
        if model_kwargs.get("cache") is None:
            cache = MemoryCache(model_kwargs.pop("mems", None))
            cache.batch_repeat_interleave(max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1))
            model_kwargs["cache"] = cache
        if generation_config.prefill_chunk_size is None:
            generation_config.prefill_chunk_size = PREFILL


@dataclass(frozen=True)
class Padding:
    """Where the text of each row stands, to turn rows padded at the right until their last token stands at the end.

    The model knows only padding at the left, because a memory is contiguous in time. Its output is turned back.
    """

    real: Tensor  # bool (B, T), False at padding
    n_pad: Tensor | None  # int64 (B,), places of a row that hold no token; None: all rows are whole
    shift: Tensor  # int64 (B,), places by which a row turns right to end with its last token

    @classmethod
    def of(cls, real_BT: Tensor) -> "Padding":
        """Find the padding of rows from `real_BT`, False at padding; ValueError between tokens."""
        B, T = real_BT.shape
        if bool(real_BT.all()):
            return cls(real_BT, None, torch.zeros(B, dtype=torch.int64, device=real_BT.device))
        place_T = torch.arange(T, device=real_BT.device)
        first_B = torch.where(real_BT, place_T, T).amin(dim=1)
        last_B = torch.where(real_BT, place_T, -1).amax(dim=1)
        n_real_B = real_BT.sum(dim=1)
        holes = (n_real_B > 0) & (last_B - first_B + 1 != n_real_B)
        if bool(holes.any()):
            row = int(holes.nonzero()[0, 0])
            raise ValueError(
                f"row {row} of attention_mask has padding between tokens; pad at the left or at the right of each text only"
            )
        return cls(real_BT, T - n_real_B, torch.where(n_real_B > 0, T - 1 - last_B, 0))

    def turn(self, x_BT: Tensor, *, fill: int = 0) -> Tensor:
        """Turn every row of (B, T, …) right until its last token stands at the end, with `fill` at padding.

        Example:
            >>> padding = Padding.of(torch.tensor([[True, True, False]]))
            >>> padding.turn(torch.tensor([[5, 6, 0]])).tolist()
            [[0, 5, 6]]
            >>> padding.turn_back(torch.tensor([[0, 5, 6]])).tolist()
            [[5, 6, 0]]
        """
        if self.n_pad is not None:
            x_BT = x_BT.masked_fill(~self.real.view(*self.real.shape, *[1] * (x_BT.dim() - 2)), fill)
        return _turned(x_BT, -self.shift)

    def turn_back(self, x_BT: Tensor) -> Tensor:
        """Undo `turn`."""
        return _turned(x_BT, self.shift)

    def turn_weights_back(self, weights_BNTS: Tensor) -> Tensor:
        """Undo `turn` for how much tokens attend to keys, (B, N, T, S): memory, and then the tokens where the caller has them.

        In a row that was read, padding comes before memory, so that memory ends where the text begins.
        """
        if self.n_pad is None:
            return weights_BNTS
        T = weights_BNTS.shape[2]
        M = weights_BNTS.shape[3] - T
        memory_BM = torch.arange(M, device=self.shift.device) + self.n_pad[:, None]
        place_BT = (torch.arange(T, device=self.shift.device) + self.shift[:, None]) % T
        token_BT = torch.where(place_BT < self.n_pad[:, None], place_BT, place_BT + M)
        source_BS = torch.cat([memory_BM, token_BT], dim=1)
        weights = weights_BNTS.gather(3, source_BS[:, None, None, :].expand_as(weights_BNTS))
        return self.turn_back(weights.transpose(1, 2)).transpose(1, 2)


def _turned(x_BT: Tensor, offset_B: Tensor) -> Tensor:
    if not bool(offset_B.any()):
        return x_BT
    B, T = x_BT.shape[:2]
    source_BT = (torch.arange(T, device=x_BT.device) + offset_B[:, None]) % T
    return x_BT[torch.arange(B, device=x_BT.device)[:, None], source_BT]


def _with_prefix(module: Any, state_dict: dict[str, Any], *_: Any) -> None:
    """Accept the names of our files, in place, because `Trainer` gives a checkpoint's tensors directly to `load_state_dict`."""
    for name in [name for name in state_dict if not name.startswith(_PREFIX)]:
        state_dict[_PREFIX + name] = state_dict.pop(name)


def _check_head(config: TransformerXLPretrainedConfig, gives: tuple[str | None, ...], source: str) -> None:
    """Refuse a model of another task than a class is for."""
    kind = None if config.native.head is None else config.native.head.kind
    if kind in gives:
        return
    if kind is None:
        raise ConfigError(f"'{source}' is not fine-tuned, so it has no head; txl finetune makes one")
    autos = {"span": "QuestionAnswering", "choice": "MultipleChoice", "tokens": "TokenClassification"}
    auto = autos.get(kind, "SequenceClassification")
    raise ConfigError(f"'{source}' is fine-tuned for task '{kind}'; load it with AutoModelFor{auto}")


def _check_file(source: str, arguments: dict[str, Any], cls: type[TransformerXLPreTrainedModel]) -> None:
    """Refuse a damaged file, and a config that asks for other tensors, before transformers makes a module for any."""
    download = download_arguments(arguments)
    path = cached_file(source, WEIGHTS_FILE, _raise_exceptions_for_missing_entries=False, **download)
    if path is None:  # transformers reports that itself
        return
    config = arguments.get("config")
    if not isinstance(config, TransformerXLPretrainedConfig):
        config = cast("type[TransformerXLPretrainedConfig]", cls.config_class).from_pretrained(source, **download)
    _check_head(config, cls.gives, source)
    cached_file(source, MANIFEST_FILE, _raise_exceptions_for_missing_entries=False, **download)
    folder = Path(path).parent
    tensors = {name.removeprefix(_PREFIX): spec for name, spec in TensorFile(Path(path)).tensors.items()}
    fitting_blueprint(make_model, config.native, tensors, path)
    if manifest := manifest_of(folder):
        manifest.check(Path(path), record_of(Path(path)).sha256)


def _memory(mems: Mems | None, cache: MemoryCache | None) -> Mems | None:
    if cache is None:
        return mems
    if mems is not None:
        raise ValueError("mems and cache are two memories; give one of them")
    return cache.mems


def real_tokens(ids: Tensor, mask: Tensor | None, vocab_size: int, *, continued: bool) -> Tensor:
    """Return bool (B, T), False at padding."""
    real_BT = ids != vocab_size
    if mask is None:
        return real_BT
    (B, T), fits = ids.shape, mask.dim() == 2 and mask.shape[0] == ids.shape[0]
    if not fits or mask.shape[1] < T or (mask.shape[1] > T and not continued):
        raise ValueError(f"attention_mask {tuple(mask.shape)} must have the shape of input_ids ({B}, {T})")
    return real_BT & (mask[:, -T:] != 0)


def _tokens(ids: Tensor | None, vectors: Tensor | None, model: TransformerXL) -> Tensor:
    """Return the ids of a text, or the vectors that stand for them."""
    if ids is not None and vectors is None:
        return ids
    if vectors is None or ids is not None:
        raise ValueError("input_ids and inputs_embeds are two forms of a text; give one of them")
    D = model.config.d_model
    if vectors.dim() != 3 or vectors.shape[2] != D:
        raise ValueError(f"inputs_embeds {tuple(vectors.shape)} must have shape (batch, length, {D})")
    if model.config.ngram_rows or (model.training and model.config.dropemb):
        raise ValueError("inputs_embeds do not say the tokens, which ngram_rows and, in training, dropemb need; give input_ids")
    return vectors


def _targets(labels: Tensor, real_BT: Tensor) -> Tensor:
    """Shift labels: position t is scored against label t + 1, if both are tokens."""
    if labels.shape != real_BT.shape:
        raise ValueError(f"labels {tuple(labels.shape)} must have the shape of input_ids {tuple(real_BT.shape)}")
    scored = real_BT[:, :-1] & real_BT[:, 1:]
    return F.pad(labels[:, 1:].masked_fill(~scored, -100), (0, 1), value=-100)


def _loss(nll: Tensor | None, logits: Tensor | None, targets: Tensor, n_items: Tensor | int | None) -> Tensor:
    """Return the mean over scored tokens, 0 if there are none, or the sum divided by `n_items`."""
    if nll is None:
        assert logits is not None  # the model returns one of the two
        scores = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        nll = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
    return nll.sum() / ((targets != -100).sum().clamp(min=1) if n_items is None else n_items)
