"""Memory of one training process: what it holds between steps, and the most that a step adds.

Activations are counted tensor by tensor, as the backward pass needs them; tests compare them with what autograd keeps.

Shapes: B rows, T tokens of a segment, X = B T, M positions of memory, S keys, A width of all heads together, D d_model.
"""

from dataclasses import dataclass

from transformer_xl.config.run import OptimConfig
from transformer_xl.cost.work import Work, clusters
from transformer_xl.kernels.fused import SCRATCH_BYTES, n_padded
from transformer_xl.model.attention.alibi import AlibiAttention
from transformer_xl.model.attention.rotary import RotaryAttention
from transformer_xl.model.attention.shaw import ShawAttention
from transformer_xl.model.shift import BLOCK, GROUPS
from transformer_xl.training.optim import state_bytes

_FP32 = 4
_NORM = 2 * _FP32  # mean and scale of a token


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one process at the fullest moment of a step."""

    weights: int  # in fp32
    gradients: int  # in fp32
    optimizer: int  # moments and counters
    mems: int  # hidden states that all lanes remember, before the step and after it
    activations: int  # kept for the backward pass, and the working memory of one layer
    logits: int  # scores of the vocabulary for the tokens that are scored at once
    lowered: int  # copies of the weights in the precision of the products
    gathered: int = 0  # weights and gradients of other processes, if these are divided

    @property
    def total(self) -> int:
        """All of it: an upper bound, because with `train.accumulate = 1` gradients appear while activations are freed."""
        return sum(vars(self).values())


def count_memory(work: Work, optim: OptimConfig, *, n_group: int = 1, n_share: int = 1) -> StepMemory:
    """Count the memory of a process whose steps have `n_group` passes, each over its own lanes.

    Weights, gradients and optimizer are divided among `n_share` processes.
    """
    size = _FP32 * sum(p.numel() for p in work.model.parameters())
    return StepMemory(
        weights=-(-size // n_share),
        gradients=-(-size // n_share),
        optimizer=-(-state_bytes(work.model, optim) // n_share),
        mems=2 * n_group * mems_bytes(work),
        activations=activation_bytes(work) + _working_bytes(work),
        logits=logits_bytes(work),
        lowered=lowered_bytes(work),
        gathered=2 * 2 * _largest_unit(work) if n_share > 1 else 0,
    )


def mems_bytes(work: Work) -> int:
    """Return the bytes of the tensors that the memory is a slice of: the segment's states, or memory and segment joined."""
    M, T = work.model.mem_len, work.tgt_len
    n_kept = T if T >= M else M + T
    return work.model.config.n_layer * work.rows * n_kept * work.model.config.d_model * _FP32


def activation_bytes(work: Work) -> int:
    """Return the bytes of what all layers keep for the backward pass."""
    config = work.model.config
    n_layer = config.n_layer * work.segments
    # the backward pass reads the memories between the segments of a pass, where they are not changed before they are read
    is_read, is_joined = config.pre_lnorm or work.checkpointing, work.tgt_len < work.model.mem_len
    linked = (work.segments - 1) * mems_bytes(work) if is_read and is_joined else 0
    if work.checkpointing:  # the input of each layer, and one layer's activations while its gradients are computed
        return linked + n_layer * work.n_token * config.d_model * _FP32 + layer_bytes(work)
    return linked + n_layer * layer_bytes(work)


def layer_bytes(work: Work) -> int:
    """Return the bytes of what one layer keeps for the backward pass."""
    return _attention_bytes(work) + _feed_forward_bytes(work)


def logits_bytes(work: Work) -> int:
    """Return the bytes of log-probabilities that are kept, and of the gradients of one chunk of them."""
    kept, largest = 0.0, 0.0
    is_narrow = work.element != _FP32
    # fused kernels read narrow scores, and write narrow gradients
    score, gradients = (
        (work.element, work.element) if work.is_fused and is_narrow else (_FP32, 2 * _FP32 + is_narrow * work.element)
    )
    for cluster in clusters(work.model, work.shares):
        n = work.n_token * cluster.share
        at_once = cluster.tokens_at_once(on_cpu=work.on_cpu)
        chunk = min(n, at_once) * cluster.n_class
        kept += 0 if n > at_once else work.segments * chunk * score
        largest = max(largest, chunk * gradients)
    return round(kept + largest)


def _attention_bytes(work: Work) -> int:
    config, X, B, S = work.model.config, work.n_token, work.rows, work.n_key
    D, A, M, e = config.d_model, work.attention_width, work.model.mem_len, work.element
    is_lowered = e != _FP32
    n = _entering_bytes(work)
    # a second copy, because queries are projected apart from keys and values
    n += X * D * e if is_lowered or work.is_fused else 0
    # a copy of the memory's states, unless they can be read from Mems as they are
    is_copied = is_lowered or work.is_fused or work.changes_memory or config.shift_reach or (work.tgt_len != M and B > 1)
    n += B * M * D * e if is_copied else 0
    n += B * M * _NORM if config.pre_lnorm else 0
    n += _shifted_bytes(work) if config.shift_reach else 0
    n += X * A * e + 2 * B * S * A * e + X * A * e  # queries, keys and values, and what the heads found
    # turned keys are another tensor; the projected ones are still there, because values are a part of the same
    n += B * S * A * e if issubclass(work.kind, RotaryAttention) and (B == 1 or not work.on_cpu) else 0
    is_padded = work.backend == "triton" and work.by_keys
    if work.compares_distances:
        n += (n_padded(S) if is_padded else S) * A * e  # keys of distances
        n += 0 if is_padded else X * A * e  # queries with another bias
        n += S * D * e if is_lowered and work.by_keys else 0
    n += S * config.n_head * e if issubclass(work.kind, (ShawAttention, AlibiAttention)) else 0  # what distances add to scores
    if work.by_keys or work.on_cpu:
        return n + _scores_bytes(work) + _closing_bytes(work)
    n_mask = B if not work.compares_distances and not issubclass(work.kind, AlibiAttention) else B * config.n_head
    return n + n_mask * work.tgt_len * S * e + X * config.n_head * _FP32 + _closing_bytes(work)  # and a sum of each query


def _shifted_bytes(work: Work) -> int:
    """Return the bytes of what layers read instead of the memory's states, and of weights of averages."""
    config, k = work.model.config, work.model.config.shift_reach
    n_state = work.model.mem_len if config.pre_lnorm else 0
    n, n_average = min(work.tgt_len, BLOCK), len(GROUPS) - 1  # the first group is the token before alone
    # on a CPU, a matrix for all rows if all of them are full
    n_weight = n_average * (n * (k + n + 1) if work.on_cpu else work.n_token * (k + n))
    return (work.rows * n_state * config.d_model + n_weight) * _FP32


def _scores_bytes(work: Work) -> int:
    """Return the bytes that a backend keeps besides queries, keys and values."""
    config, T, e = work.model.config, work.tgt_len, work.element
    if work.backend == "triton" and work.by_keys:
        return work.n_token * config.n_head * _FP32 + work.kept_position_bytes  # the first: a sum for each query
    n_weight = work.rows * config.n_head * T * work.n_key
    kept = (n_weight * e if e != _FP32 else 0) + (n_weight if config.dropatt else 0)
    # the result a second time, as the output projection reads it; weights; the mask of hidden keys
    return work.n_token * work.attention_width * e + kept + T * T * e


def _feed_forward_bytes(work: Work) -> int:
    config, X, e = work.model.config, work.n_token, work.element
    each = e if config.activation == "relu" and (work.on_cpu or work.is_fused or not config.dropout) else 2 * e
    is_masked = config.dropout > 0 and each == 2 * e and not work.is_fused
    return _entering_bytes(work) + X * config.d_inner * (each + is_masked) + _closing_bytes(work)


def _entering_bytes(work: Work) -> int:
    """Return the bytes of the input of a block's first product, and of the layer norm before it."""
    X, D, e = work.n_token, work.model.config.d_model, work.element
    if work.model.config.pre_lnorm:
        return X * D * (_FP32 + e) + X * _NORM  # the norm's input, and its result in the precision of the products
    return X * D * e


def _closing_bytes(work: Work) -> int:
    """Return the bytes of dropout's mask, of a gate, and of the layer norm after a block."""
    config, X, e = work.model.config, work.n_token, work.element
    if work.is_fused and config.gate == "sum":  # both sides of the residual sum
        return 0 if config.pre_lnorm else X * config.d_model * (_FP32 + e)
    gate = X * config.d_model * {"sum": 0, "gru": 3 * (_FP32 + e)}[config.gate]
    norm = 0 if config.pre_lnorm else X * (config.d_model * _FP32 + _NORM)
    return gate + norm + (X * config.d_model if config.dropout and not work.is_fused else 0)


def _working_bytes(work: Work) -> int:
    """Return the bytes of gradients and intermediate results in the larger block of a layer."""
    config, X, e = work.model.config, work.n_token, work.element
    feed_forward = X * (2 * config.d_inner * e + 2 * config.d_model * _FP32)
    scores = 0  # on a CPU of few heads at a time
    if not work.on_cpu:
        scores = 3 * work.rows * config.n_head * work.tgt_len * work.n_key * e
    if work.backend == "triton":
        scores = min(scores, 2 * SCRATCH_BYTES)  # of positions, and their gradients
    return max(feed_forward, 6 * X * work.attention_width * e + scores)


def lowered_bytes(work: Work) -> int:
    """Return the bytes of weights in the precision of the products, as the backward pass reads them."""
    if work.precision == "fp32":
        return 0
    config, A, K = work.model.config, work.attention_width, work.segments
    # weights that project the memory are kept only if its states have a gradient; those for distances never are
    n_memory = K if work.changes_memory else K - 1
    gates = 2 * {"sum": 0, "gru": 6}[config.gate] * config.d_model
    layer = config.d_model * (K * (4 * A + 2 * config.d_inner + gates) + n_memory * 2 * A)
    vocabulary = sum(cluster.n_class * cluster.width for cluster in clusters(work.model, work.shares))
    return work.element * (config.n_layer * layer + K * vocabulary)  # each segment makes new copies


def _largest_unit(work: Work) -> int:
    """Return the bytes of the largest part that is gathered at once: a layer, or embedding and softmax."""
    layer = sum(p.numel() for p in work.model.layers[0].parameters())
    rest = sum(p.numel() for name, p in work.model.named_parameters() if not name.startswith("layers."))
    return _FP32 * max(layer, rest)
