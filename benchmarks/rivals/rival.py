"""What all rivals have in common: the library's layers between our embedding and our softmax, and padded rows.

Shapes: B batch, T tgt_len, D d_model.
"""

from abc import abstractmethod
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.config.model import ModelConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.adaptive import make_softmax
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Memory


def library(name: str) -> ModuleType:
    """Import a module of a rival's library."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported ({error}); `make rivals` makes .venv-rivals, which has it") from None


class Rival(LanguageModel):
    """A language model whose layers are another library's.

    Its layers are found twice. `body` is what the library made, and computes. What learns in it is registered under the names
    by which our optimizers tell parameters apart: Muon updates the matrices in `layers`, AdamW everything else.
    """

    body: nn.Module

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        vars(self)["body"] = self.make_body()  # not registered as it stands, because its names are others
        self.register_parts()
        self.softmax = make_softmax(config)
        with torch.no_grad():
            self.init_embedding(self.embedding.get_parameter("weight"))

    @abstractmethod
    def make_body(self) -> nn.Module:
        """Return the library's layers, with the weights that it begins with."""

    @abstractmethod
    def register_parts(self) -> None:
        """Register all parts of the body that have parameters or buffers, the layers as `layers`."""

    @abstractmethod
    def init_embedding(self, weight: Tensor) -> None:
        """Draw the vectors of tokens as the library does."""

    @abstractmethod
    def read_rows(self, x_BTD: Tensor, mems: Memory) -> tuple[Tensor, Memory]:
        """Return the last states, (B, T, D), and the new memory; no row is padded."""

    def train(self, mode: bool = True) -> "Rival":
        """Set the mode of the body, too."""
        self.body.train(mode)
        return super().train(mode)

    def check_context(self) -> None:
        """Refuse a memory that leaves out the end of a segment."""
        super().check_context()
        if self.ext_len and self.mem_len:
            raise ConfigError(f"ext_len ({self.ext_len}) must be 0 with a memory: {self.described} remembers what it reads")

    def read(
        self,
        ids: Tensor,
        *,
        mems: Memory | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Memory]:
        """Return the last states, (B, T, D), and the new memory; rows with equal padding are read together."""
        if rows.document_starts is not None:
            raise ConfigError(f"{self.described} cannot begin a document inside a segment; use train.reset_at_documents=false")
        past: Memory = self.init_mems(len(ids)) if mems is None else mems
        x_BTD = self.drop_input(self.embed(ids))
        if rows.n_pad is None:
            h_BTD, new = self.read_rows(x_BTD, past)
        else:
            h_BTD, new = self._read_padded(x_BTD, past, rows.n_pad)
        return h_BTD, new if keep_graph else new.detach()

    def _read_padded(self, x_BTD: Tensor, mems: Memory, n_pad: Tensor) -> tuple[Tensor, Memory]:
        states, memories, order = [], [], []
        for n in n_pad.unique().tolist():
            own = (n_pad == n).nonzero().flatten()
            x_bTD, memory = x_BTD[own], mems.select(own)
            h_bTD = torch.zeros_like(x_bTD)
            if n < x_BTD.shape[1]:
                h_bTD, memory = self.read_rows(x_bTD[:, n:], memory)
                h_bTD = F.pad(h_bTD, (0, 0, n, 0))
            states.append(h_bTD)
            memories.append(memory)
            order.append(own)
        back = torch.cat(order).argsort()
        return torch.cat(states)[back], type(mems).concatenate(memories).select(back)
