"""Fine-tuned models behind the methods that transformers calls: classes, numbers, choices, places, and labels of tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_outputs import MultipleChoiceModelOutput, SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils.generic import ModelOutput

from transformer_xl.huggingface.config import XLNetPretrainedConfig
from transformer_xl.huggingface.model import Padding, TransformerXLPreTrainedModel, real_tokens

N_BEST = 5
"""Starts of an answer, and ends for each of them, as Hugging Face's XLNet has by default."""


class _Labeled(TransformerXLPreTrainedModel):
    """A model fine-tuned to give texts, choices or tokens scores; what it returns is named as in transformers."""

    returns: ClassVar[type[ModelOutput]]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Score texts of any length, read segment by segment with memory; a row of a document is read alone.

        Args:
            input_ids: int64 (B, T), of choices (B, C, T), laid out as our tokenizer does it; the id `vocab_size`, its `<pad>`,
                is padding.
            attention_mask: of the same shape, 0 at padding, at the left or right of a row's text.
            token_type_ids: int64 of the same shape, the text that each token belongs to (XLNet); None: all to the same.
            labels: what is right; -100 or NaN is not scored.
            return_dict: False: return a tuple, without what is None.

        Returns:
            the mean loss, with labels, and logits: of texts (B, n_label), of choices (B, C), of tokens (B, T, n_label). A
            padded row gets the same as alone.

        Raises:
            ValueError: shapes that do not fit, a text without tokens, or padding between tokens.
        """
        mask, segments = (None if x is None else x.flatten(0, -2) for x in (attention_mask, token_type_ids))
        rows, padding = _rows(input_ids.flatten(0, -2), mask, segments, self.config.vocab_size)
        rows = {name: x.view(*input_ids.shape[:-1], *x.shape[1:]) for name, x in rows.items()}
        logits = self.transformer(**rows).logits
        if "tokens" in self.gives:
            logits = padding.turn_back(logits)
        loss = None if labels is None else _mean(self.transformer.head.nll(logits, labels), labels)
        result = self.returns(loss=loss, logits=logits)
        return result.to_tuple() if return_dict is False else result


class TransformerXLForSequenceClassification(_Labeled):
    """A model fine-tuned to classify texts, to give each any of several labels, or a number.

    `labels` are int64 (B,) for classes, floats (B, n_label) of 0 and 1 for labels, floats (B,) for numbers.
    """

    gives = ("classification", "multilabel", "regression")
    returns = SequenceClassifierOutput


class TransformerXLForMultipleChoice(_Labeled):
    """A model fine-tuned to choose one of several texts; rows are (B, C, T), `labels` int64 (B,)."""

    gives = ("choice",)
    returns = MultipleChoiceModelOutput


class TransformerXLForTokenClassification(_Labeled):
    """A model fine-tuned to give every token a label; `labels` are int64 (B, T), -100 where one is not scored."""

    gives = ("tokens",)
    returns = TokenClassifierOutput


@dataclass
class TransformerXLQuestionAnsweringOutput(ModelOutput):
    """Where answers may stand; the names are those of `XLNetForQuestionAnsweringOutput`.

    Attributes:
        loss: mean over the rows; only with positions.
        start_top_log_probs: (B, K), best first.
        start_top_index: int64 (B, K), places in `input_ids`.
        end_top_log_probs: (B, K * J), of the J best ends for the first start, then for the second, and so on.
        end_top_index: int64 (B, K * J), their places.
        cls_logits: (B,), high where the text has no answer.
    """

    loss: Tensor | None = None
    start_top_log_probs: Tensor | None = None
    start_top_index: Tensor | None = None
    end_top_log_probs: Tensor | None = None
    end_top_index: Tensor | None = None
    cls_logits: Tensor | None = None


class TransformerXLForQuestionAnswering(TransformerXLPreTrainedModel):
    """A model fine-tuned to find the place of an answer in a passage."""

    gives = ("span",)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        is_impossible: Tensor | None = None,
        p_mask: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> TransformerXLQuestionAnsweringOutput | tuple[Any, ...]:
        """Find answers.

        Args:
            input_ids: int64 (B, T), at most `head.tgt_len` tokens, laid out as our tokenizer does it.
            attention_mask: (B, T), 0 at padding, at the left or right of a row's text.
            token_type_ids: int64 (B, T), the text that each token belongs to (XLNet); None: all to the same.
            start_positions: int64 (B,), first token of the answer, or the row's last token if it has none.
            end_positions: int64 (B,), last token of the answer.
            is_impossible: (B,), 1 where there is no answer; None: all have one.
            p_mask: (B, T), 1 for tokens that no answer consists of, such as the question's; None: there are none.
            return_dict: False: return a tuple, without what is None.

        Returns:
            the loss, with positions; otherwise the best starts, their best ends, and whether there is no answer.

        Raises:
            ValueError: shapes that do not fit, a text without tokens, padding between tokens, or one position alone.
        """
        if (start_positions is None) != (end_positions is None):
            raise ValueError("start_positions and end_positions belong together; give both or none")
        rows, padding = _rows(input_ids, attention_mask, token_type_ids, self.config.vocab_size)
        shift_B = padding.shift
        if p_mask is not None:
            rows["may_answer"] = padding.turn(p_mask == 0)
        if start_positions is not None and end_positions is not None:
            none_B = torch.zeros_like(start_positions) if is_impossible is None else is_impossible.to(start_positions.dtype)
            labels = torch.stack([start_positions + shift_B, end_positions + shift_B, none_B], dim=1)
            labels = labels.where((start_positions >= 0).unsqueeze(1), -100)
            result = TransformerXLQuestionAnsweringOutput(loss=_mean(self.transformer(**rows, labels=labels).nll, labels))
        else:
            found = self.transformer.span_scores(**rows, n_start=N_BEST, n_end=N_BEST)
            result = TransformerXLQuestionAnsweringOutput(
                start_top_log_probs=found.start_log_probs,
                start_top_index=found.starts - shift_B[:, None],
                end_top_log_probs=found.end_log_probs.flatten(1),
                end_top_index=found.ends.flatten(1) - shift_B[:, None],
                cls_logits=found.no_answer,
            )
        return result.to_tuple() if return_dict is False else result


class XLNetForSequenceClassification(TransformerXLForSequenceClassification):
    """The same of an XLNet."""

    config_class = XLNetPretrainedConfig


class XLNetForMultipleChoice(TransformerXLForMultipleChoice):
    """The same of an XLNet."""

    config_class = XLNetPretrainedConfig


class XLNetForTokenClassification(TransformerXLForTokenClassification):
    """The same of an XLNet."""

    config_class = XLNetPretrainedConfig


class XLNetForQuestionAnswering(TransformerXLForQuestionAnswering):
    """The same of an XLNet."""

    config_class = XLNetPretrainedConfig


def _rows(ids: Tensor, mask: Tensor | None, segments: Tensor | None, vocab_size: int) -> tuple[dict[str, Tensor], Padding]:
    """Return rows as our model takes them, padded at the left, and where they were padded."""
    padding = Padding.of(real_tokens(ids, mask, vocab_size, continued=False))
    is_empty = ~padding.real.any(dim=1)
    if bool(is_empty.any()):
        raise ValueError(f"text {int(is_empty.nonzero()[0, 0])} has no tokens; leave it out")
    segments = torch.zeros_like(ids) if segments is None else segments
    n_pad = torch.zeros_like(ids[:, 0]) if padding.n_pad is None else padding.n_pad
    return {"ids": padding.turn(ids), "segments": padding.turn(segments), "n_pad": n_pad}, padding


def _mean(nll: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the rows or tokens that are scored, 0 if there are none."""
    is_scored = labels.isnan().logical_not() if labels.is_floating_point() else labels != -100
    return nll.sum() / is_scored.view(*nll.shape, -1).any(dim=-1).sum().clamp(min=1)
