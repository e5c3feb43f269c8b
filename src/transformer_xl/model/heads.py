"""What fine-tuning puts on top of a model: scores of a text or of its tokens, or places in it.

    text: summary state → (dense, tanh) → dropout → scores
    tokens: state of each token → dropout → scores
    span: start_i = w·h_i;  end_j = w·LayerNorm(tanh(W [h_j ; h_start]));  none = w·dropout(tanh(W [Σ p_i h_i ; h_cls]))

Reference: `summarize_sequence`, `classification_loss` and `regression_loss` of the authors' `modeling.py`, and `get_qa_outputs`
of their `function_builder.py`; of tokens, Hugging Face's `XLNetForTokenClassification`. Heads compute at least in the precision
of their weights, whatever products elsewhere use.

Shapes: B batch, L tokens of a window, D d_model, K starts, J ends for each of them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.model import HeadConfig
from transformer_xl.kernels.cpu_linear import linear
from transformer_xl.kernels.device import at_least_fp32
from transformer_xl.model.dropout import Dropout

_ENDS_WEIGHT = 0.5
"""Weight of start and of end in the loss of a span."""

_ANSWERABLE_WEIGHT = 0.5
"""Weight of whether there is an answer."""


@dataclass(frozen=True)
class SpanScores:
    """The best places of an answer in each window, best first.

    The last token of a window stands for "no answer", so it may be among starts and ends; whoever decodes leaves it out.

    Attributes:
        starts: int64 (B, K), first tokens of answers.
        start_log_probs: (B, K), natural logarithms of their probabilities; -inf for tokens that may not answer.
        ends: int64 (B, K, J), last tokens of answers that begin at each start.
        end_log_probs: (B, K, J), logarithms of their probabilities, given the start.
        no_answer: (B,), a score that is high where there is no answer, before the sigmoid.
        scores: (B, K, J), the sums of both scores before the softmax over a window, which can be compared between windows.
    """

    starts: Tensor
    start_log_probs: Tensor
    ends: Tensor
    end_log_probs: Tensor
    no_answer: Tensor
    scores: Tensor


class TextHead(nn.Module):
    """Scores of a text from the state that sums it up, or of each token from its own."""

    def __init__(self, head: HeadConfig, *, d_model: int) -> None:
        super().__init__()
        self.kind = head.kind
        self.summary = nn.Linear(d_model, d_model) if head.summarizes else None
        self.drop = Dropout(head.dropout)
        self.scores = nn.Linear(d_model, head.n_score)

    def forward(self, state: Tensor) -> Tensor:
        """Return the scores of states (B, D) or (B, L, D): (B, n_score) or (B, L, n_score), at least in fp32."""
        with torch.autocast(state.device.type, enabled=False):
            state = state.to(self.scores.weight.dtype)
            if self.summary is not None:
                state = linear(state, self.summary.weight, self.summary.bias).tanh()
            return at_least_fp32(linear(self.drop(state), self.scores.weight, self.scores.bias))

    def nll(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each text, (B,), or of each token, (B, L), 0 where it is not scored.

        Args:
            scores: (B, n_score); of a choice (B, C), of tokens (B, L, n_score).
            labels: classification and choice: int64 (B,), tokens: int64 (B, L); -100 is not scored. Multilabel: (B, n_label)
                of 0 and 1, and regression: (B,); NaN is not scored.

        Returns:
            Nats of the class; the mean nats of the labels; the squared error.
        """
        if self.kind in ("classification", "choice", "tokens"):
            scores = scores.mT if self.kind == "tokens" else scores  # classes stand second
            return F.cross_entropy(scores, labels, reduction="none", ignore_index=-100)
        scores = scores.squeeze(-1) if self.kind == "regression" else scores
        scored = ~labels.isnan()
        labels = labels.to(scores.dtype).where(scored, 0.0)  # NaN times 0 would be a gradient of NaN
        if self.kind == "regression":
            return (scores - labels).square().where(scored, 0.0)
        nats = F.binary_cross_entropy_with_logits(scores, labels, reduction="none").where(scored, 0.0)
        return nats.sum(dim=1) / scored.sum(dim=1).clamp(min=1)


class SpanHead(nn.Module):
    """Where an answer begins and ends, and whether there is none. Arguments as `make_head`."""

    def __init__(self, head: HeadConfig, *, d_model: int, layer_norm_epsilon: float) -> None:
        super().__init__()
        self.start = nn.Linear(d_model, 1)
        self.end_inner = nn.Linear(2 * d_model, d_model)
        self.end_norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.end = nn.Linear(d_model, 1)
        self.answerable_inner = nn.Linear(2 * d_model, d_model)
        self.drop = Dropout(head.dropout)
        self.answerable = nn.Linear(d_model, 1, bias=False)

    def nll(self, h_BLD: Tensor, may_answer: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each window, (B,): (start + end) / 2 + (is there none) / 2; 0 where it is not scored.

        Args:
            h_BLD: states; the last token of a window stands for "no answer".
            may_answer: bool (B, L), tokens that an answer may consist of.
            labels: int64 (B, 3), first and last token of the answer, and 1 if there is none; -100 is not scored.
        """
        with torch.autocast(h_BLD.device.type, enabled=False):
            h_BLD = h_BLD.to(self.start.weight.dtype)
            allowed_BL = _allowed(may_answer)
            scored_B = labels[:, 0] >= 0
            start_B1, end_B1 = labels[:, :1].clamp(min=0), labels[:, 1:2].clamp(min=0)
            start_BL = self._starts(h_BLD, allowed_BL).log_softmax(-1)
            end_BKL = self._ends(h_BLD, start_B1, allowed_BL).log_softmax(-1)
            none_B = self._no_answer(h_BLD, start_BL)
            nats_B = -start_BL.gather(1, start_B1).squeeze(1) - end_BKL.squeeze(1).gather(1, end_B1).squeeze(1)
            is_none_B = labels[:, 2].clamp(min=0).to(none_B.dtype)
            unsure_B = F.binary_cross_entropy_with_logits(none_B, is_none_B, reduction="none")
            nll_B = _ENDS_WEIGHT * nats_B + _ANSWERABLE_WEIGHT * unsure_B
            return nll_B.where(scored_B, 0.0)

    def best(self, h_BLD: Tensor, may_answer: Tensor, *, n_start: int, n_end: int) -> SpanScores:
        """Return the most likely starts, and for each the most likely ends; a window of fewer tokens has fewer."""
        with torch.autocast(h_BLD.device.type, enabled=False):
            h_BLD = h_BLD.to(self.start.weight.dtype)
            allowed_BL = _allowed(may_answer)
            score_BL = self._starts(h_BLD, allowed_BL)
            start_BL, n_token = score_BL.log_softmax(-1), score_BL.shape[1]
            start_log_probs, starts_BK = start_BL.topk(min(n_start, n_token))
            score_BKL = self._ends(h_BLD, starts_BK, allowed_BL)
            end_log_probs, ends_BKJ = score_BKL.log_softmax(-1).topk(min(n_end, n_token))
            scores_BKJ = score_BL.gather(1, starts_BK).unsqueeze(-1) + score_BKL.gather(2, ends_BKJ)
            none_B = self._no_answer(h_BLD, start_BL)
            return SpanScores(starts_BK, start_log_probs, ends_BKJ, end_log_probs, none_B, scores_BKJ)

    def _starts(self, h_BLD: Tensor, allowed_BL: Tensor) -> Tensor:
        """Return the score of an answer that begins at each token, (B, L)."""
        return _masked(linear(h_BLD, self.start.weight, self.start.bias).squeeze(-1), allowed_BL)

    def _ends(self, h_BLD: Tensor, starts_BK: Tensor, allowed_BL: Tensor) -> Tensor:
        """Return the score of an answer that begins at each start and ends at each token, (B, K, L)."""
        D = h_BLD.shape[-1]
        start_BKD = h_BLD.gather(1, starts_BK.unsqueeze(-1).expand(-1, -1, D))
        # the product of [h ; h_start] in two parts, so that neither is computed for all pairs
        own, of_start = self.end_inner.weight.split(D, dim=1)
        inner_BKLD = linear(h_BLD, own).unsqueeze(1) + linear(start_BKD, of_start, self.end_inner.bias).unsqueeze(2)
        normed = self.end_norm(inner_BKLD.tanh())
        return _masked(linear(normed, self.end.weight, self.end.bias).squeeze(-1), allowed_BL.unsqueeze(1))

    def _no_answer(self, h_BLD: Tensor, start_BL: Tensor) -> Tensor:
        """Return a score that is high where there is no answer, (B,)."""
        start_BD = torch.einsum("bl,bld->bd", start_BL.exp().to(h_BLD.dtype), h_BLD)
        both = torch.cat([start_BD, h_BLD[:, -1]], dim=-1)
        inner = linear(both, self.answerable_inner.weight, self.answerable_inner.bias).tanh()
        return at_least_fp32(linear(self.drop(inner), self.answerable.weight).squeeze(-1))


def make_head(head: HeadConfig, *, d_model: int, layer_norm_epsilon: float, init_std: float) -> TextHead | SpanHead:
    """Return a head with random weights: normal ones of `init_std`; biases 0 and norms 1.

    Args:
        head: its settings.
        d_model: width of the states that it reads.
        layer_norm_epsilon: added to the variance in its norm.
        init_std: standard deviation.
    """
    made: TextHead | SpanHead
    if head.kind == "span":
        made = SpanHead(head, d_model=d_model, layer_norm_epsilon=layer_norm_epsilon)
    else:
        made = TextHead(head, d_model=d_model)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, init_std)
    return made


def _allowed(may_answer: Tensor) -> Tensor:
    """Return bool (B, L), where a span may begin or end: answers, and the last token, which stands for "no answer"."""
    is_last = torch.arange(may_answer.shape[1], device=may_answer.device) == may_answer.shape[1] - 1
    return may_answer | is_last


def _masked(score: Tensor, allowed: Tensor) -> Tensor:
    """Return scores at least in fp32; -inf where it is not allowed."""
    return at_least_fp32(score).masked_fill(~allowed, float("-inf"))
