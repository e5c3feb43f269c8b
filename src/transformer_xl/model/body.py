"""A Transformer-XL without embedding and softmax, for streams of vectors: what an agent observes, frames, measurements.

Shapes: B batch, T tgt_len, F features, D d_model.
"""

from typing import cast

from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.build import make_model
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Memory
from transformer_xl.model.transformer_xl import TransformerXL


class TransformerXLBody(nn.Module):
    """The layers of a Transformer-XL with their memory: vectors in, vectors out.

    Agents that learn from windows of steps but act step by step should set `same_length=True`: each step then sees exactly
    `mem_len` steps before it, in a window as in a single step, so both give the same numbers. That does not hold for the kinds
    of attention that count positions from the end of a window (`vaswani`, `al_rfou`). See docs/models.md.

    Args:
        config: sizes and options; those of vocabulary, embedding and softmax are ignored.
        d_input: F, features of a vector; a linear map brings them to d_model. None: vectors have D features already.

    Raises:
        ConfigError: settings that only tokens can have (`ngram_rows` and `dropemb`).

    Example:
        >>> import torch
        >>> sizes = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16, "mem_len": 4}
        >>> body = TransformerXLBody(TransformerXLConfig(**sizes, gate="gru", pre_lnorm=True), d_input=3)
        >>> y, mems = body(torch.zeros(5, 1, 3), mems=body.init_mems(5))
        >>> y.shape, mems.n_valid.tolist()
        (torch.Size([5, 1, 8]), [1, 1, 1, 1, 1])
    """

    def __init__(self, config: TransformerXLConfig, *, d_input: int | None = None) -> None:
        super().__init__()
        for name, value in (("ngram_rows", config.ngram_rows), ("dropemb", config.dropemb)):
            if value:
                raise ConfigError(f"{name} ({value}) is for tokens, and this model reads vectors; leave it out")
        plain = {"vocab_size": 1, "cutoffs": (), "div_val": 1, "d_embed": None}
        self.model = cast("TransformerXL", make_model(config.model_copy(update=plain)))
        del self.model.softmax
        D = config.d_model
        inputs = nn.Identity() if d_input is None else nn.Linear(d_input, D)
        self.model.embedding = inputs  # pyright: ignore[reportAttributeAccessIssue]  # `read` gets vectors, and leaves it alone
        self.config, self.d_input = config, D if d_input is None else d_input

    def init_mems(self, batch_size: int) -> Memory:
        """Return an empty memory of `batch_size` rows, which has the shape of a full one."""
        return self.model.init_mems(batch_size)

    def forward(
        self,
        x_BTF: Tensor,
        *,
        mems: Memory | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Memory]:
        """Read some steps of each row after the memory of those before them.

        Args:
            x_BTF: (B, T, F), T of at least 1.
            mems: memory returned by the last call, or `init_mems`; None: empty.
            rows: `Rows(document_starts=…)`, bool (B, T), where an episode begins, which sees nothing from before it; `n_pad`,
                steps at the left of each row that are none.
            execution: how to compute; the result is the same.
            keep_graph: the new memory keeps its gradients.

        Returns:
            (B, T, D), and the new memory.

        Raises:
            ValueError: shapes that do not fit together.
        """
        if x_BTF.dim() != 3 or x_BTF.shape[1] == 0 or x_BTF.shape[2] != self.d_input:
            raise ValueError(
                f"vectors {tuple(x_BTF.shape)} must have shape (batch, steps, {self.d_input}) with a step at least"
            )
        for name, flags, n_axis in (("document_starts", rows.document_starts, 2), ("n_pad", rows.n_pad, 1)):
            if flags is not None and flags.shape != x_BTF.shape[:n_axis]:
                raise ValueError(f"{name} {tuple(flags.shape)} must have shape {tuple(x_BTF.shape[:n_axis])}")
        self.model.check_memory(mems, x_BTF.shape[0])
        x_BTD = self.model.embedding(x_BTF)
        last_BTD, mems = self.model.read(x_BTD, mems=mems, rows=rows, execution=execution, keep_graph=keep_graph)  # pyright: ignore[reportArgumentType]
        return self.model.drop_output(last_BTD), mems
