"""What a model is: sizes and options of each kind, validated and frozen.

Modules get plain arguments; only the code that builds a model sees these classes.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, field_validator, model_validator

from transformer_xl.config.settings import Natural, Positive, Probability, Section
from transformer_xl.errors import CheckpointError, ConfigError, did_you_mean, shown
from transformer_xl.untrusted import read_json_object

Activation = Literal["relu", "gelu", "gelu_tanh", "relu2"]
"""Names of the non-linearities of a feed-forward network."""


GateKind = Literal["sum", "gru"]
"""How a layer joins its states and what a block found for them; see `model/gates.py`."""


STAND_ALONE = ("choice", "span")
"""Kinds of tasks whose texts are no rows of documents."""


class TextSettings(Section):
    """How texts are read for a head: the settings of a task, which its model keeps."""

    summary: Literal["last", "mean"] = Field(
        default="last", description="the head reads the state of the last token, or the mean of all"
    )
    max_len: Positive | None = Field(default=None, description="tokens of a text that are read, from its beginning; None: all")
    gradient_segments: Positive = Field(
        default=1, description="training: gradients reach through so many of a text's last segments"
    )
    doc_stride: Positive = Field(default=128, description="span: tokens by which windows of a long passage move on")
    max_query_len: Positive = Field(default=64, description="span: tokens of a question that are read")
    max_answer_len: Positive = Field(default=64, description="span: tokens of the longest answer")


class HeadConfig(TextSettings):
    """What fine-tuning adds to a model: a head over its last states, and how texts are read for it."""

    kind: Literal["classification", "multilabel", "regression", "choice", "span", "tokens"] = Field(
        description="what the head gives: a class, any of several labels, a number, one of several texts, a place in a text, "
        "or a label of each word"
    )
    labels: tuple[str, ...] = Field(
        default=(), strict=False, max_length=100_000, description="names of classes or labels, in the order of their scores"
    )
    projection: bool = Field(default=True, description="a square layer with tanh stands before the scores")
    dropout: Probability = Field(default=0.1, description="dropout before the scores")
    tgt_len: Positive = Field(default=512, description="tokens per segment; longer texts are read on with memory")
    in_documents: bool = Field(
        default=False, description="texts are the rows of documents: each is read with the memory of those before it"
    )
    no_answer_above: Probability | None = Field(
        default=None, description="span: probability of no answer above which none is given; None: there always is one"
    )

    @property
    def n_score(self) -> int:
        """How many scores the head gives for a text, or for each of its tokens."""
        return len(self.labels) if self.kind in ("classification", "multilabel", "tokens") else 1

    @property
    def summarizes(self) -> bool:
        """Whether a square layer with tanh stands before the scores; a token's state is no summary."""
        return self.projection and self.kind != "tokens"

    @model_validator(mode="after")
    def _reads_documents(self) -> Self:
        if self.in_documents and self.kind in STAND_ALONE:
            raise ValueError(
                f"in_documents (True) does not go with a {self.kind}, whose texts stand alone; leave documents out"
            )
        return self

    @model_validator(mode="after")
    def _labeled(self) -> Self:
        least = {"classification": 2, "multilabel": 1, "tokens": 2}.get(self.kind, 0)
        if len(set(self.labels)) != len(self.labels) or len(self.labels) < least or (self.labels and not least):
            raise ValueError(
                f"labels ({len(self.labels)}) of kind {self.kind} must be {least} different names or more"
                if least
                else f"labels ({len(self.labels)}) must be empty, kind {self.kind} has none"
            )
        return self


class ModelConfig(Section):
    """Sizes and options that all kinds of model have: vocabulary, embedding, softmax, dropout, initialization, memory.

    What a kind does with them says the class of its models.
    """

    kind: ClassVar[str]
    """Name of the kind in recipes."""

    predicts: ClassVar[Literal["token", "target"]] = "token"
    """token: each from those before it, as a `LanguageModel` does; target: chosen ones, with both sides in sight."""

    remembers: ClassVar[Literal["positions", "state", "nothing"]] = "positions"
    """What a model carries from segment to segment: something for each past position, one state, or nothing."""

    vocab_size: Positive | None = Field(default=None, description="number of token ids; filled in from the tokenizer")
    n_layer: Positive = Field(default=12, description="number of layers")
    d_model: Positive = Field(
        default=512, description="width of the states that layers pass on, in numbers; transformer_xl: even"
    )
    d_embed: Positive | None = Field(default=None, description="width of the embedding; None means d_model")
    dropout: Probability = Field(default=0.1, description="dropout on activations")
    locked_dropout: bool = Field(
        default=False, description="dropout on activations is the same at all positions of a row and segment (variational)"
    )
    dropinput: Probability | None = Field(
        default=None, description="dropout on the input of the first layer; None means dropout"
    )
    dropoutput: Probability | None = Field(default=None, description="dropout on the input of the softmax; None means dropout")
    dropemb: Probability = Field(default=0.0, description="dropout of whole words from the input")
    dropweight: Probability = Field(default=0.0, description="dropout on the weights of the layers' matrices (DropConnect)")
    tie_weight: bool = Field(default=True, description="softmax weights are the embedding weights")
    cutoffs: tuple[Natural, ...] = Field(
        default=(),
        strict=False,
        max_length=100,
        description="first ids of the tails of an adaptive softmax (ids sorted by frequency, as of words); empty: one softmax",
    )
    div_val: Positive = Field(default=1, description="factor between the widths of the vectors of a cluster and the next")
    tie_projs: tuple[bool, ...] | None = Field(
        default=None,
        strict=False,
        description="per cluster, from the head: the softmax projects with the embedding's projection; None: none",
    )
    proj_share_all_but_first: bool = Field(default=False, description="the same as tie_projs for all clusters but the head")
    proj_same_dim: bool = Field(
        default=True, description="div_val > 1: also project clusters whose vectors already have width d_model"
    )
    init: Literal["normal", "uniform"] = Field(default="normal", description="distribution of initial weights")
    init_range: PositiveFloat = Field(default=0.1, description="init = uniform: largest initial weight")
    init_std: PositiveFloat = Field(default=0.02, description="init = normal: standard deviation of initial weights")
    proj_init_std: PositiveFloat = Field(
        default=0.01, description="init = normal: the same for the projections of embedding and softmax"
    )
    mem_len: Natural = Field(default=0, description="positions of memory kept per layer (tokens)")
    head: HeadConfig | None = Field(default=None, description="set by fine-tuning: what the model gives besides predictions")

    @model_validator(mode="after")
    def _clusters_fit(self) -> Self:
        borders = [0, *self.cutoffs, self.vocab_size or float("inf")]
        if any(low >= high for low, high in itertools.pairwise(borders)):
            raise ValueError(
                f"cutoffs {self.cutoffs} must increase and stay between 0 and vocab_size ({self.vocab_size}); "
                "drop the offending ones, all with --set model.cutoffs=[]"
            )
        n_cluster = len(self.cutoffs) + 1
        if self.tie_projs is not None:
            if self.proj_share_all_but_first:
                raise ValueError("tie_projs and proj_share_all_but_first say the same thing twice; use one of them")
            if len(self.tie_projs) != n_cluster:
                raise ValueError(f"tie_projs {self.tie_projs} must have one value per cluster, head first: {n_cluster}")
        width = self.d_embed or self.d_model
        if width // self.div_val ** (n_cluster - 1) < 1:
            raise ValueError(
                f"div_val ({self.div_val}) leaves nothing of d_embed ({width}) in the last of {n_cluster} clusters; lower it"
            )
        return self

    @property
    def numbers_per_position(self) -> int:
        """The most numbers that a position of memory takes in all layers: an old and a new state."""
        return 2 * self.n_layer * self.d_model

    @property
    def n_earlier(self) -> int:
        """How many tokens before a segment its vectors of tokens depend on."""
        return 0

    @property
    def embedding_scale(self) -> float:
        """What the vectors of tokens are multiplied by."""
        return self.d_model**0.5

    @property
    def begins_with_zeros(self) -> bool:
        """True if a stream begins with a memory of zeros that is attended to."""
        return False

    @property
    def longest_segment(self) -> int | None:
        """The most tokens that can be read at once; None: no limit."""
        return None

    def completed(self, *, vocab_size: int, tgt_len: int) -> Self:
        """Return these settings with what only a run knows: the size of its vocabulary, and its longest segment."""
        return self._with(vocab_size=vocab_size)

    def _with(self, **values: Any) -> Self:
        """Return these settings with some values replaced, validated again."""
        return type(self)(**{**self.model_dump(), **values})

    @property
    def tied_projections(self) -> tuple[bool, ...]:
        """Whether the softmax uses the embedding's projection, per cluster, head first."""
        if self.tie_projs is not None:
            return self.tie_projs
        return (False, *(self.proj_share_all_but_first for _ in self.cutoffs))


class AttentionConfig(ModelConfig):
    """Settings of models whose layers attend."""

    n_head: Positive = Field(default=8, description="attention heads per layer")
    d_head: Positive = Field(default=64, description="width of one head")
    d_inner: Positive = Field(default=2048, description="width of the feed-forward layer")
    dropatt: Probability = Field(default=0.0, description="dropout on attention probabilities")
    dropqkv: Probability = Field(default=0.0, description="dropout on queries, keys and values")
    pre_lnorm: bool = Field(default=False, description="layer norm before each block instead of after it")
    layer_norm_epsilon: PositiveFloat = Field(default=1e-5, description="added to the variance in layer norms")
    final_norm: bool = Field(default=False, description="one more layer norm after the last layer (useful with pre_lnorm)")
    activation: Activation = Field(
        default="relu",
        description="feed-forward non-linearity; relu2 = relu²; gelu_tanh: gelu by tanh, as in XLNet",
    )

    @property
    def shift_reach(self) -> int:
        """How many tokens before its own each block of a layer reads, besides what attention sees."""
        return 0

    @property
    def numbers_per_position(self) -> int:
        # an old and a new state, or a key, a value and the key of a distance
        return self.n_layer * max(2 * self.d_model, 3 * self.n_head * self.d_head)


class TransformerXLConfig(AttentionConfig):
    """Sizes and options of a `TransformerXL`; the names are those of the authors' code, `None` replaces their -1."""

    kind: ClassVar[str] = "transformer_xl"

    attention: str = Field(
        default="transformer_xl",
        description="positions: the paper's, or of shaw, vaswani, al_rfou, rotary or alibi, or a kind of your own",
    )
    max_klen: Positive | None = Field(
        default=None, description="longest memory and segment together (tokens), learned positions of shaw, al_rfou; None: sum"
    )
    clamp_len: Positive | None = Field(
        default=None,
        description="largest distance told apart (tokens; shaw: one less), except by al_rfou; None, as for rotary: no limit",
    )
    mem_len: Natural = Field(default=512, description="positions of memory kept per layer (tokens)")
    same_length: bool = Field(default=False, description="give every query the same number of keys, mem_len, itself included")
    same_length_besides_self: bool = Field(
        default=False, description="same_length: mem_len keys besides the query's own, as in TensorFlow, instead of with it"
    )
    zero_first_memory: bool = Field(
        default=False,
        description="a stream begins with a memory of mem_len zeros that queries attend to, as in Hugging Face and TF",
    )
    untie_r: bool = Field(default=False, description="transformer_xl: u and v per layer instead of shared by all layers")
    shift: Literal["none", "averages"] = Field(
        default="none",
        description="what layers read of the tokens right before each: averages = the last one and means that fade",
    )
    ngram_rows: tuple[Annotated[int, Field(gt=0, le=2**31)], ...] = Field(
        default=(),
        strict=False,
        max_length=8,
        description="rows of a table of vectors of pairs of tokens, of one of triples, and so on, added to those of tokens; "
        "empty: none",
    )
    gate: GateKind = Field(
        default="sum",
        description="how a layer joins its states and what a block found: added, or by a gate as in GTrXL (pre_lnorm)",
    )

    @field_validator("d_model")
    @classmethod
    def _even(cls, d_model: int) -> int:
        if d_model % 2:
            raise ValueError(f"must be even, because its sinusoids come in pairs; use {d_model + 1}")
        return d_model

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.gate != "sum" and not self.pre_lnorm:
            raise ValueError(
                f"gate ('{self.gate}') needs pre_lnorm (False): with a norm behind it, a closed gate would change states; "
                "set model.pre_lnorm=true"
            )
        if self.shift == "averages" and self.d_model % 8:
            raise ValueError(
                f"d_model ({self.d_model}) must be a multiple of 8, because shift 'averages' divides it in eighths; "
                f"use {-(-self.d_model // 8) * 8}"
            )
        for name, value in (("shift", self.shift if self.shift_reach else None), ("ngram_rows", list(self.ngram_rows))):
            if value and self.zero_first_memory:
                raise ValueError(
                    f"{name} ({value!r}) and zero_first_memory (True) exclude each other: programs whose memory begins with "
                    "zeros know neither shifts nor n-grams; leave one of them out"
                )
        return self

    @property
    def shift_reach(self) -> int:
        # 32: what is left out of a moving average is less than a thousandth of it
        return 0 if self.shift == "none" else 32

    @property
    def n_earlier(self) -> int:
        return len(self.ngram_rows)

    @property
    def begins_with_zeros(self) -> bool:
        return self.zero_first_memory


class VanillaConfig(AttentionConfig):
    """Sizes and options of a `Vanilla`, the Transformer that Al-Rfou et al. 2018 train on separate segments."""

    kind: ClassVar[str] = "vanilla"
    remembers: ClassVar[Literal["positions", "state", "nothing"]] = "nothing"

    max_len: Positive | None = Field(
        default=None, description="number of learned positions, and so the longest segment; None: train.tgt_len"
    )
    intermediate_losses: bool = Field(
        default=False, description="all layers predict, layer l of n in the first l / 2n of training (their section 2.1)"
    )
    n_target: Annotated[int, Field(ge=1, le=100)] = Field(
        default=1, description="tokens that each position predicts in training; those after the first count by half"
    )

    @property
    def longest_segment(self) -> int | None:
        return self.max_len

    def completed(self, *, vocab_size: int, tgt_len: int) -> Self:
        return self._with(vocab_size=vocab_size, max_len=self.max_len or tgt_len)


class LstmConfig(ModelConfig):
    """Sizes and options of an `Lstm`; dropout as in AWD-LSTM (Merity et al. 2017)."""

    kind: ClassVar[str] = "lstm"
    remembers: ClassVar[Literal["positions", "state", "nothing"]] = "state"

    n_layer: Positive = Field(default=3, description="number of layers")
    d_hidden: Positive | None = Field(
        default=None, description="width of all layers but the last, which has d_model; None means d_model"
    )
    locked_dropout: bool = Field(
        default=True, description="dropout on activations is the same at all positions of a row and segment (variational)"
    )
    dropweight: Probability = Field(default=0.0, description="dropout on the hidden-to-hidden weights (DropConnect)")
    mem_len: Natural = Field(
        default=1, description="1: the state is carried from segment to segment; 0: each begins without one"
    )


class XLNetConfig(AttentionConfig):
    """Sizes and options of an `XLNet`; the names are those of the authors' code, the defaults those of its base model."""

    kind: ClassVar[str] = "xlnet"
    predicts: ClassVar[Literal["token", "target"]] = "target"

    d_model: Positive = Field(default=768, description="width of all layers, even")
    n_head: Positive = Field(default=12, description="attention heads per layer")
    d_inner: Positive = Field(default=3072, description="width of the feed-forward layer")
    dropatt: Probability = Field(default=0.1, description="dropout on attention probabilities")
    activation: Activation = Field(
        default="gelu_tanh", description="feed-forward non-linearity; the authors' gelu is gelu_tanh, Hugging Face's is gelu"
    )
    layer_norm_epsilon: PositiveFloat = Field(default=1e-12, description="added to the variance in layer norms")
    mem_len: Natural = Field(default=384, description="positions of memory kept per layer (tokens)")
    reuse_len: Positive | None = Field(
        default=None, description="predicting targets: only so many of a row's first tokens are remembered; None: all"
    )
    clamp_len: Positive | None = Field(
        default=None, description="largest distance told apart, to both sides (tokens); None: no limit"
    )
    untie_r: bool = Field(default=True, description="u, v and s per layer instead of shared by all layers")
    zero_first_memory: bool = Field(
        default=False,
        description="a stream begins with a memory of mem_len zeros that queries attend to, as the authors train",
    )

    num_predict: Positive | None = Field(default=None, description="targets of a row of train.tgt_len; None: a sixth")
    spans: Literal["words", "pieces"] = Field(
        default="words", description="targets are spans of 1 to 5 whole words; pieces: what the authors' code draws instead"
    )
    bi_data: bool = Field(default=True, description="in training, half of the rows are read from their end")
    backward_half: bool = Field(
        default=False,
        description="the last half of every batch is read from its end, unless a call says which rows (Hugging Face's bi_data)",
    )

    @model_validator(mode="after")
    def _one_table(self) -> Self:
        if self.d_model % 2:
            raise ValueError(
                f"d_model ({self.d_model}) must be even, because its sinusoids come in pairs; use {self.d_model + 1}"
            )
        if self.cutoffs or self.div_val != 1 or self.d_embed not in (None, self.d_model):
            raise ValueError("an xlnet has one vector of width d_model per token; leave cutoffs, div_val and d_embed out")
        return self

    @property
    def embedding_scale(self) -> float:
        return 1.0

    @property
    def begins_with_zeros(self) -> bool:
        return self.zero_first_memory

    def completed(self, *, vocab_size: int, tgt_len: int) -> Self:
        reuse_len = self.reuse_len or max(tgt_len // 2, 1)
        return self._with(
            vocab_size=vocab_size,
            reuse_len=reuse_len,
            num_predict=self.num_predict or max(tgt_len // 6, 1),
        )


KINDS: dict[str, type[ModelConfig]] = {
    kind.kind: kind for kind in (TransformerXLConfig, VanillaConfig, LstmConfig, XLNetConfig)
}
"""The settings class of each kind of model, by the name of the kind; `register_model` adds others."""


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Return settings of the kind that `values` names; without a name, of a Transformer-XL.

    Raises:
        ConfigError: no such kind, an unknown key, or a value that cannot work.

    Example:
        >>> model_config({"kind": "lstm", "d_model": 200}).mem_len
        1
    """
    own = dict(values)
    kind = own.pop("kind", TransformerXLConfig.kind)
    if not isinstance(kind, str) or kind not in KINDS:
        near = did_you_mean(str(kind)[:100], KINDS)
        raise ConfigError(
            f"kind of model {shown(kind)} is not registered ({near}); if it is your own, import its module first (--import)"
        )
    return KINDS[kind](**own)


SEGMENT = "tgt_len"
"""In the `config.json` of an exported run, beside the model's settings."""


def read_config(path: Path) -> ModelConfig:
    """Read a model's `config.json`."""
    values = read_json_object(path)
    if not is_native(values):
        raise CheckpointError(
            f"'{path}' describes a model of another program, or of a kind that is not registered "
            f"({shown(values.get('model_type'))}); if it is your own, import its module first; otherwise use txl convert"
        )
    values.pop(SEGMENT, None)  # which says how the model was trained
    try:
        return model_config({"kind": values.pop("model_type"), **values})
    except ConfigError as error:
        raise CheckpointError(f"'{path}': {error}") from None


def read_segment(path: Path) -> int | None:
    """Return how many tokens the segments had that a model was trained with, if its `config.json` says so."""
    length = read_json_object(path).get(SEGMENT)
    return length if type(length) is int and length > 0 else None


def is_native(values: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is one of ours; Hugging Face calls its own XLNet by the same name."""
    kind = values.get("model_type")
    return isinstance(kind, str) and kind in KINDS and "ff_activation" not in values
