"""The Transformer-XL of Dai et al. 2019 (arXiv 1901.02860), section 3.

    h̃ = [SG(memory) ; h]                      memory before segment, along time
    q, k, v = h W_q, h̃ W_kE, h̃ W_v            queries only from the segment
    h ← LayerNorm(h + attention(q, k, v, R))    relative attention, see attention.py
    h ← LayerNorm(h + FFN(h))
    new memory = the last mem_len hidden states that entered each layer, detached

Reference: `MemTransformerLM` of the authors' `pytorch/mem_transformer.py`. Deviations: batch-first; None instead of -1; the
memory keeps only what is read again (the original also stores the output of the last layer) and is masked per row.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model, V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from transformer_xl.config import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.attention import hidden_keys
from transformer_xl.model.backends import choose_backend
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.layers import DecoderLayer
from transformer_xl.model.memory import Mems, join
from transformer_xl.model.positions import key_distances, sinusoids
from transformer_xl.model.pretrained import PretrainedMixin
from transformer_xl.model.softmax import TokenEmbedding, TokenSoftmax


@dataclass(frozen=True)
class ModelOutput:
    """What a forward pass returns.

    Attributes:
        mems: the memory after the segment, for the next call.
        logits: (B, T, V), scores of the token that follows each position; None when labels were given.
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
        mem_len: positions of memory that a forward pass keeps.
        clamp_len: largest distance told apart; None: no limit.
        same_length: every query sees `mem_len` keys, itself included. These three hold for reading, not for the weights: see
            `with_context`.

    Example:
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16))
        >>> out = model(torch.zeros(3, 5, dtype=torch.int64))
        >>> out.logits.shape, out.mems.length
        (torch.Size([3, 5, 11]), 5)
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("vocab_size (None) must be set before a model is built; take it from the tokenizer")
        d_embed = config.d_embed or config.d_model
        self.config = config
        self.backend = "auto"
        self.mem_len, self.clamp_len, self.same_length = config.mem_len, config.clamp_len, config.same_length
        self.embedding = TokenEmbedding(config.vocab_size, d_embed=d_embed, d_model=config.d_model)
        self.drop = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config.d_model,
                n_head=config.n_head,
                d_head=config.d_head,
                d_inner=config.d_inner,
                dropout=config.dropout,
                dropatt=config.dropatt,
                pre_lnorm=config.pre_lnorm,
                activation=config.activation,
            )
            for _ in range(config.n_layer)
        )
        owners = config.n_layer if config.untie_r else 1
        self.r_w_bias = nn.Parameter(torch.zeros(owners, config.n_head, config.d_head))
        self.r_r_bias = nn.Parameter(torch.zeros(owners, config.n_head, config.d_head))
        self.final_norm = nn.LayerNorm(config.d_model) if config.final_norm else nn.Identity()
        self.softmax = TokenSoftmax(config.vocab_size, d_embed=d_embed, d_model=config.d_model, tied=config.tie_weight)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights as the authors' `weights_init` does: normal or uniform, biases 0, norms around 1."""
        config = self.config
        for name, parameter in self.named_parameters():
            owner, _, kind = name.rpartition(".")
            if owner.endswith("norm") and kind == "weight":
                parameter.normal_(1.0, config.init_std)
            elif kind == "bias":
                parameter.zero_()
            elif owner.endswith("projection"):
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
            dtype=self.embedding.weight.dtype,
            device=self.embedding.weight.device,
        )

    def with_context(
        self, *, mem_len: int | None = None, clamp_len: int | None = None, same_length: bool | None = None
    ) -> Self:
        """Return the same weights read with another memory, for example a longer one at evaluation.

        Args:
            mem_len: positions of memory; None: as it is.
            clamp_len: largest distance told apart; None: as it is (a limit can be changed, not lifted).
            same_length: the same number of keys for every query; None: as it is.

        Returns:
            A view of this model: parameters are shared, nothing is copied.

        Raises:
            ConfigError: values that cannot work together.
        """
        view = copy.copy(self)
        view.mem_len = self.mem_len if mem_len is None else mem_len
        view.clamp_len = self.clamp_len if clamp_len is None else clamp_len
        view.same_length = self.same_length if same_length is None else same_length
        if view.mem_len < 0 or (view.clamp_len is not None and view.clamp_len < 1):
            raise ConfigError(f"mem_len ({mem_len}) must be at least 0 and clamp_len ({clamp_len}) at least 1")
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
    ) -> ModelOutput:
        """Read one segment after the memory of those before it.

        Args:
            ids: int64 (B, T), token ids.
            mems: memory returned by the last call, or `init_mems`; None: empty, growing up to `mem_len`.
            labels: int64 (B, T), the tokens that follow `ids`, shifted by the caller; -100 is not scored.
            document_starts: bool (B, T), True where a token begins a new document, which sees nothing from before it.
            n_pad: int64 (B,), padding tokens at the left of each row; they are neither seen nor remembered.

        Returns:
            logits, or with labels nats per token, and the new memory.

        Raises:
            ValueError: shapes that do not fit together.
        """
        _check_shapes(ids, mems, labels, self.config.n_layer)
        batch_size, T = ids.shape
        mems = self.init_mems(batch_size, length=0) if mems is None else mems
        hidden_BTS, n_own = hidden_keys(
            document_starts,
            mems.n_valid,
            n_pad,
            tgt_len=T,
            memory_length=mems.length,
            window=self.mem_len if self.same_length else None,
        )
        h_BTD = self.drop(self.embedding(ids))
        distances = key_distances(mems.length + T, clamp_len=self.clamp_len, device=ids.device)
        r_SD = self.drop(sinusoids(distances, self.config.d_model).to(h_BTD.dtype))

        attend = choose_backend(self.backend)
        remembered = []
        for i, layer in enumerate(self.layers):
            remembered.append(self._remember(mems.hidden[i], h_BTD, n_pad))
            h_BTD = layer(
                h_BTD,
                mem_BMD=mems.hidden[i],
                r_SD=r_SD,
                r_w_bias=self.r_w_bias[i % len(self.r_w_bias)],
                r_r_bias=self.r_r_bias[i % len(self.r_r_bias)],
                hidden_BTS=hidden_BTS,
                attend=attend,
                n_pad=n_pad,
            )
        h_BTD = self.drop(self.final_norm(h_BTD))
        new_mems = Mems(tuple(remembered), n_own.clamp(max=remembered[0].shape[1]))
        if labels is None:
            return ModelOutput(new_mems, logits=self.softmax.logits(h_BTD, self.embedding.weight))
        return ModelOutput(new_mems, nll=self.softmax.nll(h_BTD, labels, self.embedding.weight))

    def _remember(self, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None) -> Tensor:
        """Return the last `mem_len` hidden states, without gradient (the paper's SG)."""
        h_BTD = h_BTD.detach()
        if n_pad is None and h_BTD.shape[1] >= self.mem_len:  # nothing of the old memory is left
            return h_BTD[:, h_BTD.shape[1] - self.mem_len :]
        joined = join(mem_BMD, h_BTD, n_pad)
        return joined[:, max(joined.shape[1] - self.mem_len, 0) :]


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
