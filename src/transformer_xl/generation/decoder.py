"""`Decoder`: a model with the memory of what it has read, fed token by token or text by text."""

import torch
from torch import Tensor

from transformer_xl.model.precision import Precision, autocast
from transformer_xl.model.transformer_xl import TransformerXL


class Decoder:
    """Read streams with a memory of fixed size; the cost of a token does not grow with what was read.

    Args:
        model: put in evaluation mode.
        batch_size: rows, each a stream of its own.
        mem_len: positions of memory; None: the model's.
        tgt_len: longest piece read at once; longer input is read in pieces.
        precision: of the matrix products.

    Example:
        >>> from transformer_xl.config import TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> Decoder(model, batch_size=2).feed(torch.tensor([[0, 1, 2], [3, 2, 1]])).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        model: TransformerXL,
        *,
        batch_size: int = 1,
        mem_len: int | None = None,
        tgt_len: int = 128,
        precision: Precision = "fp32",
    ) -> None:
        self.model = model.eval().with_context(mem_len=mem_len)
        self.tgt_len = tgt_len
        self.precision: Precision = precision
        self.mems = self.model.init_mems(batch_size)

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Read on, and score what may come next.

        Args:
            ids: int64 (B, T), the next T ≥ 1 tokens of each row.

        Returns:
            Scores (B, V) of the token after the last one, fp32.
        """
        device = self.model.device
        logits = None
        with autocast(device, self.precision):
            for piece in ids.to(device).split(self.tgt_len, dim=1):
                out = self.model(piece, mems=self.mems)
                self.mems, logits = out.mems, out.logits
        assert logits is not None  # an empty text is one empty piece, which the model refuses
        return logits[:, -1].float()

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget what was read.

        Args:
            rows: bool (B,), True for rows that forget; None: all.
        """
        everything = torch.ones(self.mems.batch_size, dtype=torch.bool)
        self.mems = self.mems.reset(everything if rows is None else rows, valid=self.model.config.zero_first_memory)
