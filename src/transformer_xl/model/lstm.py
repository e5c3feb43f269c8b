"""An LSTM like the paper's RNN baselines, regularized as AWD-LSTM (Merity et al. 2017, arXiv 1708.02182).

    h_l, c_l ← LSTM_l(h_{l-1}, its last h_l, c_l)      state is carried from segment to segment, without gradient
    DropConnect on hidden-to-hidden weights, one mask per segment; locked dropout between layers; dropout of words

Its state is a memory of one position: (h, c) of every layer side by side, so code for `Mems` works with it.

Shapes: B batch, T tgt_len, D d_model, W width of a layer.
"""

import itertools
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.config.model import LstmConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.adaptive import make_softmax
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.call import Execution
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.memory import Memory, Mems

_WARM_UP = 512
"""Tokens that a state reads before the part of a stream that it scores; farther ones have almost no effect on it."""


def _lacks_lstm(device: torch.device) -> bool:
    """Say whether autocast asks for a precision for which oneDNN has no LSTM on this processor."""
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    supported = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    name = supported.get(torch.get_autocast_dtype("cpu"))
    return name is not None and not getattr(torch.ops.mkldnn, name)()


class LstmLayer(nn.Module):
    """One layer of `torch.nn.LSTM` with DropConnect on its hidden-to-hidden weights, one mask per segment.

    Args:
        d_input: width of its input.
        d_output: W, width of its state.
        dropweight: probability of dropping one of those weights.
    """

    def __init__(self, d_input: int, d_output: int, *, dropweight: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d_input, d_output, batch_first=True)
        self.drop_weight = Dropout(dropweight)

    def forward(
        self,
        x_BTD: Tensor,
        *,
        state_B1W: Tensor,
        rows: Rows,
        cuts: list[int],
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        """Read a segment in pieces, and change the states of some rows between them.

        Args:
            x_BTD: the input.
            state_B1W: h and c side by side (B, 1, 2 W).
            rows: beginnings of documents, before which a row's state is reset, and padding, which does not change it.
            cuts: where pieces begin and end, from 0 to T; documents and texts begin only there.
            kept: return the state after this many positions.

        Returns:
            The output of each position (B, T, W), and that state.
        """
        w_input, w_hidden, *biases = self.lstm.parameters()
        weights = [w_input, self.drop_weight(w_hidden), *biases]
        state = kept_state = state_B1W
        in_fp32 = _lacks_lstm(x_BTD.device)
        x_BTD = x_BTD.to(w_hidden.dtype) if in_fp32 else x_BTD
        outputs = []
        for begin, end in itertools.pairwise(cuts):
            if rows.document_starts is not None:
                state = state.where(~rows.document_starts[:, begin, None, None], 0.0)
            h, c = (part.transpose(0, 1).contiguous() for part in state.chunk(2, dim=-1))
            with torch.autocast("cpu", enabled=False) if in_fp32 else nullcontext():
                y, h, c = torch.lstm(x_BTD[:, begin:end], (h, c), weights, True, 1, 0.0, self.training, False, True)
            new = torch.cat([h, c], dim=-1).transpose(0, 1)
            state = new if rows.n_pad is None else new.where((rows.n_pad <= begin)[:, None, None], state)
            outputs.append(y)
            if end == kept:
                kept_state = state
        return torch.cat(outputs, dim=1), kept_state


class LstmState(Mems):
    """h and c of every layer side by side, as a memory of one position that is there from the beginning."""

    check = Memory.check


class Lstm(LanguageModel):
    """A language model that remembers its last state.

    Args:
        config: sizes and options; `vocab_size` must be set.

    Example:
        >>> model = Lstm(LstmConfig(vocab_size=11, n_layer=2, d_model=8))
        >>> out = model(torch.zeros(3, 5, dtype=torch.int64))
        >>> out.logits.shape, out.mems.length
        (torch.Size([3, 5, 11]), 1)
    """

    kind = LstmConfig.kind
    config: LstmConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def __init__(self, config: LstmConfig) -> None:
        super().__init__(config)
        self.check_context()
        widths = [config.d_model, *[config.d_hidden or config.d_model] * (config.n_layer - 1), config.d_model]
        sizes = itertools.pairwise(widths)
        self.layers = nn.ModuleList(LstmLayer(*size, dropweight=config.dropweight) for size in sizes)
        self.drop = Dropout(config.dropout, locked=config.locked_dropout)
        self.softmax = make_softmax(config)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw embedding and softmax as in all models and layers as in `torch.nn.LSTM`; forget gates begin open."""
        super().init_weights()
        for layer in self._own_layers():
            layer.lstm.reset_parameters()
            _, _, bias_input, bias_hidden = layer.lstm.parameters()
            bias_input.zero_()
            bias_hidden.zero_()
            bias_hidden.chunk(4)[1].fill_(1.0)

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Mems:
        widths = [2 * layer.lstm.hidden_size for layer in self._own_layers()]
        zeros = [torch.zeros(batch_size, self.mem_len, width, dtype=self.dtype, device=self.device) for width in widths]
        return LstmState(tuple(zeros), torch.zeros(batch_size, dtype=torch.int64, device=self.device))

    def _own_layers(self) -> list[LstmLayer]:
        return [cast("LstmLayer", layer) for layer in self.layers]

    def reach(self, tgt_len: int) -> int:
        return -(-_WARM_UP // tgt_len) * tgt_len if self.mem_len else 0

    def check_context(self) -> None:
        super().check_context()
        if self.mem_len > 1:
            raise ConfigError(f"mem_len ({self.mem_len}) must be 1 or 0: an lstm remembers one state")

    def read(  # pyright: ignore[reportIncompatibleMethodOverride]  # it gets its own memory back
        self,
        ids: Tensor,
        *,
        mems: Mems | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Mems]:
        return self.read_vectors(self.embed(ids), mems=mems, rows=rows, execution=execution, keep_graph=keep_graph)

    def read_vectors(
        self, x_BTD: Tensor, *, mems: Mems | None, rows: Rows, execution: Execution, keep_graph: bool
    ) -> tuple[Tensor, Mems]:
        """Do what `read` does, of vectors of tokens, (B, T, D); the last `ext_len` of them do not change the state."""
        B, T, _ = x_BTD.shape
        old = (self.init_mems(B) if mems is None else mems).hidden
        kept = max(T - self.ext_len, 0)
        cuts = {0, kept, T}
        if rows.document_starts is not None:
            cuts |= set(rows.document_starts.any(dim=0).nonzero().flatten().tolist())
        if rows.n_pad is not None:
            cuts |= set(rows.n_pad.clamp(max=T).tolist())
        x_BTD = self.drop_input(x_BTD)
        states = []
        for i, layer in enumerate(self._own_layers()):
            state = old[i] if self.mem_len else old[i].new_zeros(B, 1, old[i].shape[2])
            x_BTD, state = execution.run(layer, x_BTD, state_B1W=state, rows=rows, cuts=sorted(cuts), kept=kept)
            state = state.to(self.dtype)  # whatever the precision of products, so that stored states fit together
            states.append((state if keep_graph else state.detach())[:, : self.mem_len])
            if i < len(self.layers) - 1:
                x_BTD = self.drop(x_BTD)
        n_valid = torch.full((B,), self.mem_len, device=x_BTD.device)
        return x_BTD, LstmState(tuple(states), n_valid)
