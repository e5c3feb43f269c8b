"""The Transformer-XL of Dai et al. 2019 (arXiv 1901.02860), section 3.

    h̃ = [SG(memory) ; h]                      memory before segment, along time
    q, k, v = h W_q, h̃ W_kE, h̃ W_v            queries only from the segment
    h ← LayerNorm(h + attention(q, k, v, R))    relative attention, see attention.py
    h ← LayerNorm(h + FFN(h))
    new memory = the last mem_len hidden states that entered each layer, detached

Reference: `MemTransformerLM` of the authors' `pytorch/mem_transformer.py`. Deviations: batch-first; None instead of -1; the
memory keeps only what is read again (the original also stores the output of the last layer) and is masked per row; with
`ext_len` the first segment, too, is remembered without its end (the original swaps two arguments there, and sees it twice).

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_xl.config import AttentionKind, TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.absolute import AbsoluteAttention, add_positions
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.attention import first_keys
from transformer_xl.model.backends import choose_backend
from transformer_xl.model.dropout import Dropout, WordDropout
from transformer_xl.model.layers import AttentionBlock, DecoderLayer, FeedForward, RelativeAttention
from transformer_xl.model.memory import Mems, join
from transformer_xl.model.positions import key_distances, sinusoids
from transformer_xl.model.pretrained import PretrainedMixin
from transformer_xl.model.shaw import ShawAttention, table_rows
from transformer_xl.model.softmax import TokenEmbedding, TokenSoftmax


@dataclass(frozen=True)
class ModelOutput:
    """What a forward pass returns.

    Attributes:
        mems: the memory after the segment, for the next call.
        logits: (B, T, V), scores of the token that follows each position (with an adaptive softmax: log-probabilities); None
            when labels were given.
        nll: (B, T), nats per token in the order of the tokens, 0 where the label is -100; None without labels.
    """

    mems: Mems
    logits: Tensor | None = None
    nll: Tensor | None = None


class TransformerXL(nn.Module, PretrainedMixin):
    """A language model that reads a stream segment by segment, with a memory of fixed size.

    Args:
        config: sizes and options; `vocab_size` must be set.

    Attributes:
        config: as given.
        backend: name of the attention backend, see `choose_backend`.
        checkpoint_layers: keep only what enters each layer, and compute the rest of it again in the backward pass.
        run_layer: calls a layer in training; `run_layer`, or the same compiled.
        mem_len: positions of memory that a forward pass keeps.
        clamp_len: largest distance told apart; None: no limit.
        same_length: every query sees `mem_len` keys, itself included.
        ext_len: positions at the end of a segment that are not remembered, because the caller begins the next segment with them
            (the authors' extended context). These four hold for reading, not for the weights: see `with_context`.

    Example:
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16))
        >>> out = model(torch.zeros(3, 5, dtype=torch.int64))
        >>> out.logits.shape, out.mems.length
        (torch.Size([3, 5, 11]), 5)
    """

    r_w_bias: Tensor
    r_r_bias: Tensor
    r_emb: Tensor
    r_bias: Tensor

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("vocab_size (None) must be set before a model is built; take it from the tokenizer")
        self.config = config
        self.backend = "auto"
        self.checkpoint_layers = False
        self.run_layer: RunLayer = run_layer
        self.mem_len, self.clamp_len, self.same_length = config.mem_len, config.clamp_len, config.same_length
        self.ext_len = 0
        self.embedding = _embedding(config)
        self.drop_words = WordDropout(config.dropemb, vocab_size=config.vocab_size)
        self.drop_input = Dropout(_or(config.dropinput, config.dropout), locked=config.locked_dropout)
        self.drop_output = Dropout(_or(config.dropoutput, config.dropout), locked=config.locked_dropout)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.n_layer))
        for name, shape in _position_shapes(config).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.final_norm = norm if config.final_norm else nn.Identity()
        self.softmax = _softmax(config)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights as the authors' `weights_init` does: normal or uniform, biases 0, norms around 1."""
        config = self.config
        for name, parameter in self.named_parameters():
            owner, _, kind = name.rpartition(".")
            if owner.endswith("norm") and kind == "weight":
                parameter.normal_(1.0, config.init_std)
            elif kind in ("bias", "cluster_bias", "r_bias") or owner.endswith("biases"):
                parameter.zero_()
            elif owner.endswith(("projection", "projections")):
                parameter.normal_(0.0, config.proj_init_std)
            elif config.init == "uniform":
                parameter.uniform_(-config.init_range, config.init_range)
            else:
                parameter.normal_(0.0, config.init_std)

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Mems:
        """Return an empty memory.

        Args:
            batch_size: B, number of rows.
            length: places allotted per row; None: `mem_len`, so that shapes stay constant from the first segment on.

        Returns:
            A memory that nothing attends to, on the model's device.
        """
        return Mems.empty(
            batch_size,
            n_layer=self.config.n_layer,
            d_model=self.config.d_model,
            length=self.mem_len if length is None else length,
            dtype=self.dtype,
            device=self.device,
            valid=self.config.zero_first_memory,
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the memory."""
        return next(self.parameters()).dtype

    @property
    def is_sharded(self) -> bool:
        """True if this process holds only parts of the weights (FSDP)."""
        return any(hasattr(parameter, "full_tensor") for parameter in self.parameters())

    @property
    def window(self) -> int | None:
        """How many keys a query sees, itself included, with `same_length`; None: memory and all of its segment before it."""
        return self.mem_len + self.config.same_length_besides_self if self.same_length else None

    def with_context(
        self,
        *,
        mem_len: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        ext_len: int | None = None,
    ) -> Self:
        """Return the same weights read with another memory, for example a longer one at evaluation.

        Args:
            mem_len: positions of memory; None: as it is.
            clamp_len: largest distance told apart; None: as it is (a limit can be changed, not lifted).
            same_length: the same number of keys for every query; None: as it is.
            ext_len: positions at the end of a segment that are not remembered; None: as it is.

        Returns:
            A view of this model: parameters are shared, nothing is copied; `config` stays that of the weights, and is saved.

        Raises:
            ConfigError: values that cannot work together.
        """
        view = object.__new__(type(self))  # not copy.copy, which fails for a model that is sharded
        view.__dict__.update(self.__dict__)
        view.mem_len = self.mem_len if mem_len is None else mem_len
        view.clamp_len = self.clamp_len if clamp_len is None else clamp_len
        view.same_length = self.same_length if same_length is None else same_length
        view.ext_len = self.ext_len if ext_len is None else ext_len
        if view.mem_len < 0 or view.ext_len < 0 or (view.clamp_len is not None and view.clamp_len < 1):
            lengths = f"mem_len ({view.mem_len}) must be at least 0, ext_len ({view.ext_len}) too"
            raise ConfigError(f"{lengths}, and clamp_len ({view.clamp_len}) at least 1")
        if view.same_length and view.mem_len == 0:
            raise ConfigError("same_length (True) needs mem_len (0) of at least 1: a query sees mem_len keys")
        return view

    def forward(
        self,
        ids: Tensor,
        *,
        mems: Mems | None = None,
        labels: Tensor | None = None,
        document_starts: Tensor | None = None,
        n_pad: Tensor | None = None,
        keep_graph: bool = False,
    ) -> ModelOutput:
        """Read one segment after the memory of those before it.

        Args:
            ids: int64 (B, T), token ids.
            mems: memory returned by the last call, or `init_mems`; None: empty, growing up to `mem_len`.
            labels: int64 (B, T), the tokens that follow `ids`, shifted by the caller; -100 is not scored.
            document_starts: bool (B, T), True where a token begins a new document, which sees nothing from before it.
            n_pad: int64 (B,), padding tokens at the left of each row; they are neither seen nor remembered.
            keep_graph: the new memory keeps its gradients, so that a loss of the next segment reaches back into this one; the
                caller detaches it (`Mems.detach`) where that is to end.

        Returns:
            logits, or with labels nats per token, and the new memory.

        Raises:
            ValueError: shapes that do not fit together.
        """
        _check_shapes(ids, mems, labels, self.config.n_layer)
        h_BTD, new_mems = self.read(ids, mems=mems, document_starts=document_starts, n_pad=n_pad, keep_graph=keep_graph)
        if labels is None:
            return ModelOutput(new_mems, logits=self.softmax.logits(h_BTD, self.embedding))
        return ModelOutput(new_mems, nll=self.softmax.nll(h_BTD, labels, self.embedding))

    def read(
        self,
        ids: Tensor,
        *,
        mems: Mems | None = None,
        document_starts: Tensor | None = None,
        n_pad: Tensor | None = None,
        keep_graph: bool = False,
    ) -> tuple[Tensor, Mems]:
        """Return what the softmax is computed of, (B, T, D), and the new memory; the arguments are those of `forward`."""
        batch_size, T = ids.shape
        if mems is None:
            mems = self.init_mems(batch_size, length=None if self.config.zero_first_memory else 0)
        first_BT, n_own = first_keys(
            document_starts, mems.n_valid, n_pad, tgt_len=T, memory_length=mems.length, window=self.window
        )
        positions = self._positions(mems.length + T, ids.device)
        h_BTD = self.drop_words(self.embedding(ids), ids)
        if self.config.attention != AttentionKind.VASWANI:
            h_BTD = self.drop_input(h_BTD)
        remembered = []
        for i, layer in enumerate(self.layers):
            mem_BMD, h_BTD = self._enter(i, mems.hidden[i], h_BTD, n_pad)
            remembered.append(self._remember(mem_BMD, h_BTD, n_pad, keep_graph=keep_graph))
            h_BTD = self._run(layer, h_BTD, mem_BMD=mem_BMD, first_BT=first_BT, n_pad=n_pad, **positions[i])
        h_BTD = self.drop_output(self.final_norm(h_BTD))
        return h_BTD, Mems(tuple(remembered), (n_own - self.ext_len).clamp(min=0, max=remembered[0].shape[1]))

    def _run(self, layer: nn.Module, h_BTD: Tensor, **attention: Any) -> Tensor:
        """Run a layer; with `checkpoint_layers` its backward pass computes it again, with the same random numbers."""
        run = self.run_layer if self.training else run_layer
        if self.checkpoint_layers and torch.is_grad_enabled():
            return cast("Tensor", checkpoint(run, layer, h_BTD, use_reentrant=False, **attention))
        return run(layer, h_BTD, **attention)

    def _enter(self, i: int, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return memory and segment as they enter layer `i`: absolute positions are added here, once or in every layer."""
        if self.config.attention == AttentionKind.AL_RFOU:
            table = self.r_emb[i].flatten(1)
            return add_positions(lambda d: table[table_rows(d, n_row=len(table), clamp_len=None)], mem_BMD, h_BTD, n_pad)
        if self.config.attention == AttentionKind.VASWANI and i == 0:
            mem_BMD, h_BTD = add_positions(self._sinusoids, mem_BMD, h_BTD, n_pad)
            return mem_BMD, self.drop_input(h_BTD)
        return mem_BMD, h_BTD

    def _sinusoids(self, distances: Tensor) -> Tensor:
        limited = distances if self.clamp_len is None else distances.clamp(max=self.clamp_len)
        return sinusoids(limited.flatten(), self.config.d_model, self.dtype).unflatten(0, distances.shape)

    def _positions(self, n_key: int, device: torch.device) -> list[dict[str, Any]]:
        """Return what each layer's attention is told about positions."""
        layers = range(self.config.n_layer)
        if self.config.attention == AttentionKind.TRANSFORMER_XL:
            distances = key_distances(n_key, clamp_len=self.clamp_len, device=device)
            r_SD = self.drop_input(sinusoids(distances, self.config.d_model, self.dtype))
            u, v, owner = self.r_w_bias, self.r_r_bias, (lambda i: i % len(self.r_w_bias))
            dropatt = self.config.dropatt if self.training else 0.0
            attend = choose_backend(self.backend, device, dtype=self.dtype, dropatt=dropatt, d_head=self.config.d_head)
            return [{"r_SD": r_SD, "r_w_bias": u[owner(i)], "r_r_bias": v[owner(i)], "attend": attend} for i in layers]
        if self.config.attention == AttentionKind.SHAW:
            distances = key_distances(n_key, clamp_len=None, device=device)
            rows = table_rows(distances, n_row=self.r_emb.shape[1], clamp_len=self.clamp_len)
            r_LSNH, r_bias_LSN = self.r_emb[:, rows], self.r_bias[:, rows]
            return [{"r_SNH": r_LSNH[i], "r_bias_SN": r_bias_LSN[i], "r_w_bias": self.r_w_bias[i]} for i in layers]
        return [{} for _ in layers]

    def _remember(self, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None, *, keep_graph: bool) -> Tensor:
        """Return the last `mem_len` hidden states, without gradient (the paper's SG) unless `keep_graph`."""
        if not keep_graph:
            mem_BMD, h_BTD = mem_BMD.detach(), h_BTD.detach()
        whole = n_pad is None and h_BTD.shape[1] >= self.mem_len + self.ext_len  # nothing of the old memory is left
        joined = h_BTD if whole else join(mem_BMD, h_BTD, n_pad)
        end = max(joined.shape[1] - self.ext_len, 0)
        return joined[:, max(end - self.mem_len, 0) : end]


def _or(own: float | None, common: float) -> float:
    return common if own is None else own


RunLayer = Callable[..., Tensor]


def run_layer(layer: nn.Module, h_BTD: Tensor, **attention: Any) -> Tensor:
    """Call a layer."""
    return layer(h_BTD, **attention)


def _clusters(config: TransformerXLConfig) -> dict[str, Any]:
    """Return what adaptive embedding and softmax are both told."""
    return {
        "cutoffs": config.cutoffs,
        "div_val": config.div_val,
        "d_embed": config.d_embed or config.d_model,
        "d_model": config.d_model,
        "proj_same_dim": config.proj_same_dim,
    }


def _embedding(config: TransformerXLConfig) -> TokenEmbedding | AdaptiveEmbedding:
    assert config.vocab_size is not None
    if config.div_val == 1:
        return TokenEmbedding(config.vocab_size, d_embed=config.d_embed or config.d_model, d_model=config.d_model)
    return AdaptiveEmbedding(config.vocab_size, **_clusters(config))


def _softmax(config: TransformerXLConfig) -> TokenSoftmax | AdaptiveSoftmax:
    assert config.vocab_size is not None
    tied, tied_projections = config.tie_weight, config.tied_projections
    if not config.cutoffs and config.div_val == 1:
        sizes = {"d_embed": config.d_embed or config.d_model, "d_model": config.d_model}
        return TokenSoftmax(config.vocab_size, **sizes, tied=tied, tied_projection=tied_projections[0])
    return AdaptiveSoftmax(config.vocab_size, **_clusters(config), tied=tied, tied_projections=tied_projections)


_ATTENTION: dict[AttentionKind, type[AttentionBlock]] = {
    AttentionKind.TRANSFORMER_XL: RelativeAttention,
    AttentionKind.SHAW: ShawAttention,
    AttentionKind.VASWANI: AbsoluteAttention,
    AttentionKind.AL_RFOU: AbsoluteAttention,
}


def _layer(config: TransformerXLConfig) -> DecoderLayer:
    block: dict[str, Any] = {
        "dropout": config.dropout,
        "dropweight": config.dropweight,
        "locked_dropout": config.locked_dropout,
        "pre_lnorm": config.pre_lnorm,
        "layer_norm_epsilon": config.layer_norm_epsilon,
    }
    heads: dict[str, Any] = {
        "n_head": config.n_head,
        "d_head": config.d_head,
        "dropatt": config.dropatt,
        "dropqkv": config.dropqkv,
    }
    return DecoderLayer(
        _ATTENTION[config.attention](config.d_model, **heads, **block),
        FeedForward(config.d_model, d_inner=config.d_inner, activation=config.activation, **block),
    )


def _position_shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that say where keys stand; layers share u and v unless `untie_r`."""
    heads = (config.n_head, config.d_head)
    if config.attention == AttentionKind.TRANSFORMER_XL:
        owners = config.n_layer if config.untie_r else 1
        return {"r_w_bias": (owners, *heads), "r_r_bias": (owners, *heads)}
    if config.attention == AttentionKind.VASWANI:
        return {}
    if config.max_klen is None:
        raise ConfigError(
            f"attention '{config.attention}' learns positions: max_klen (None) must say how many, such as tgt_len + mem_len"
        )
    table = (config.n_layer, config.max_klen)
    if config.attention == AttentionKind.AL_RFOU:
        return {"r_emb": (*table, *heads)}
    return {"r_emb": (*table, *heads), "r_bias": (*table, config.n_head), "r_w_bias": (config.n_layer, *heads)}


def _check_shapes(ids: Tensor, mems: Mems | None, labels: Tensor | None, n_layer: int) -> None:
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(f"ids {tuple(ids.shape)} must have shape (batch, tgt_len) with tgt_len of at least 1")
    if labels is not None and labels.shape != ids.shape:
        raise ValueError(f"labels {tuple(labels.shape)} must have the shape of ids {tuple(ids.shape)}")
    if mems is not None and (mems.batch_size, len(mems.hidden)) != (ids.shape[0], n_layer):
        raise ValueError(
            f"mems of {mems.batch_size} rows and {len(mems.hidden)} layers must fit ids of {ids.shape[0]} rows and "
            f"a model of {n_layer} layers; use model.init_mems({ids.shape[0]})"
        )
