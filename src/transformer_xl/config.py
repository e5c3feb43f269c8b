"""What a run is: validated, frozen settings, read from TOML recipes and `key=value` overrides.

Order of precedence: defaults < recipe < `--set section.key=value`. Unknown keys fail with the nearest known name. A recipe is
data (`recipes/*.toml`), never code. Modules receive plain arguments; only `from_config` functions see these classes.
"""

import itertools
import tomllib
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from transformer_xl.errors import ConfigError, did_you_mean

Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Parallelism = Literal["ddp", "fsdp"]


class _Frozen(BaseModel):
    """A frozen settings class whose construction errors are one line each."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_one_line(type(self), error)) from None


class AttentionKind(StrEnum):
    """How a query knows where a key stands; the authors' `attn_type` 0 to 3, in this order."""

    TRANSFORMER_XL = "transformer_xl"
    SHAW = "shaw"
    VASWANI = "vaswani"
    AL_RFOU = "al_rfou"


class TransformerXLConfig(_Frozen):
    """Sizes and options of a `TransformerXL`; the names are those of the authors' code, `None` replaces their -1."""

    attention: AttentionKind = Field(
        default=AttentionKind.TRANSFORMER_XL,
        description="the paper's positions; shaw: learned distances; vaswani: absolute sinusoids; al_rfou: learned per layer",
    )
    max_klen: Positive | None = Field(
        default=None, description="shaw, al_rfou: distances with a learned vector of their own; None: train.tgt_len + mem_len"
    )
    vocab_size: Positive | None = Field(default=None, description="number of token ids; filled in from the tokenizer")
    n_layer: Positive = Field(default=12, description="number of layers")
    d_model: Positive = Field(default=512, description="width of the residual stream; even")
    n_head: Positive = Field(default=8, description="attention heads per layer")
    d_head: Positive = Field(default=64, description="width of one head")
    d_inner: Positive = Field(default=2048, description="width of the feed-forward layer")
    d_embed: Positive | None = Field(default=None, description="width of the embedding; None means d_model")
    dropout: Probability = Field(default=0.1, description="dropout on activations")
    dropatt: Probability = Field(default=0.0, description="dropout on attention probabilities")
    locked_dropout: bool = Field(
        default=False, description="dropout on activations is the same at all positions of a row and segment (variational)"
    )
    dropinput: Probability | None = Field(
        default=None, description="dropout on what enters the first layer, and on r; None means dropout"
    )
    dropoutput: Probability | None = Field(default=None, description="dropout on what the softmax reads; None means dropout")
    dropqkv: Probability = Field(default=0.0, description="dropout on queries, keys and values")
    dropemb: Probability = Field(default=0.0, description="dropout of whole words of the vocabulary from the input")
    dropweight: Probability = Field(default=0.0, description="dropout on the weights of the layers' matrices (DropConnect)")
    mem_len: Natural = Field(default=512, description="positions of memory kept per layer (tokens)")
    clamp_len: Positive | None = Field(
        default=None, description="largest distance told apart (tokens), except by al_rfou; None: no limit"
    )
    same_length: bool = Field(default=False, description="give every query the same number of keys, mem_len, itself included")
    same_length_besides_self: bool = Field(
        default=False, description="same_length: mem_len keys besides the query's own, as in TensorFlow, instead of with it"
    )
    zero_first_memory: bool = Field(
        default=False, description="a stream begins after mem_len zero vectors that are attended to, as in Hugging Face and TF"
    )
    pre_lnorm: bool = Field(default=False, description="layer norm before each block instead of after it")
    layer_norm_epsilon: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="added to the variance in layer norms")
    final_norm: bool = Field(default=False, description="one more layer norm after the last layer (useful with pre_lnorm)")
    activation: Literal["relu", "gelu", "relu2"] = Field(
        default="relu", description="feed-forward non-linearity; relu2 = relu²"
    )
    untie_r: bool = Field(default=False, description="transformer_xl: u and v per layer instead of shared by all layers")
    tie_weight: bool = Field(default=True, description="softmax weights are the embedding weights")
    cutoffs: tuple[int, ...] = Field(
        default=(),
        description="first ids of the tails of an adaptive softmax (ids sorted by frequency, as of words); empty: one softmax",
    )
    div_val: Positive = Field(default=1, description="each cluster's vectors are so many times narrower than those before")
    tie_projs: tuple[bool, ...] | None = Field(
        default=None, description="per cluster, from the head: the softmax projects with the embedding's projection; None: none"
    )
    proj_share_all_but_first: bool = Field(default=False, description="short for tie_projs of all clusters but the head")
    proj_same_dim: bool = Field(
        default=True, description="div_val > 1: project also those clusters whose vectors have width d_model already"
    )
    init: Literal["normal", "uniform"] = Field(default="normal", description="distribution of initial weights")
    init_range: Annotated[float, Field(gt=0)] = Field(default=0.1, description="half-width when init = 'uniform'")
    init_std: Annotated[float, Field(gt=0)] = Field(default=0.02, description="standard deviation when init = 'normal'")
    proj_init_std: Annotated[float, Field(gt=0)] = Field(
        default=0.01, description="the same for the projections of embedding and softmax"
    )

    @field_validator("d_model")
    @classmethod
    def _even(cls, d_model: int) -> int:
        if d_model % 2:
            raise ValueError(f"must be even, for its sinusoids come in pairs; use {d_model + 1}")
        return d_model

    @model_validator(mode="after")
    def _consistent(self) -> "TransformerXLConfig":
        if self.same_length and self.mem_len == 0:
            raise ValueError("same_length (True) needs mem_len (0) of at least 1: a query sees mem_len keys")
        if self.attention == AttentionKind.AL_RFOU and self.n_head * self.d_head != self.d_model:
            raise ValueError(
                f"attention 'al_rfou' adds positions of width n_head x d_head ({self.n_head * self.d_head}) to states of width "
                f"d_model ({self.d_model}); make them equal"
            )
        self._check_clusters()
        return self

    def _check_clusters(self) -> None:
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

    @property
    def counts_from_end(self) -> bool:
        """True for kinds of attention whose positions count from the end of the segment that is read."""
        return self.attention in (AttentionKind.VASWANI, AttentionKind.AL_RFOU)

    @property
    def learns_positions(self) -> bool:
        """True for kinds of attention with a learned table of positions, of `max_klen` rows."""
        return self.attention in (AttentionKind.SHAW, AttentionKind.AL_RFOU)

    @property
    def tied_projections(self) -> tuple[bool, ...]:
        """Per cluster, head first: whether the softmax uses the embedding's projection."""
        if self.tie_projs is not None:
            return self.tie_projs
        return (False, *(self.proj_share_all_but_first for _ in self.cutoffs))


class TokenizerConfig(_Frozen):
    """How text becomes ids."""

    kind: Literal["byte", "char", "word", "bpe"] = Field(default="byte", description="unit of text")
    vocab_size: Positive | None = Field(default=None, description="bpe: vocabulary size (default 8192); word: largest size")
    min_frequency: Natural = Field(default=0, description="word: rarer words become <unk>; bpe: rarer pairs are not merged")
    lower_case: bool = Field(default=False, description="word: fold case")
    byte_fallback: bool = Field(default=False, description="char: write characters that the corpus lacks as bytes")


class DataConfig(_Frozen):
    """Where the text comes from and how it is divided."""

    corpus: str = Field(default="python-stdlib", description="name, file, directory or glob")
    split: tuple[float, float, float] = Field(
        default=(0.9, 0.05, 0.05), description="train, valid, test shares when none is given"
    )
    directory: str | None = Field(default=None, description="where a named corpus lies; None: $TXL_DATA, else downloaded")
    document_separator: str | None = Field(default=None, description="a line that divides documents inside a file")
    documents: Literal["files", "lines"] = Field(
        default="files", description="files: each is a document, or several by document_separator; lines: each line is one"
    )
    shuffle: Literal["none", "documents", "shards"] = Field(
        default="none",
        description="training: documents in another order every epoch, drawn from train.seed; shards: shards, and inside each",
    )

    @model_validator(mode="after")
    def _one_division(self) -> "DataConfig":
        if self.documents == "lines" and self.document_separator is not None:
            raise ValueError(
                f"documents ('lines') and document_separator ({self.document_separator!r}) both divide the text; use one"
            )
        return self

    @property
    def separator(self) -> str | None:
        """What divides documents inside a file: a line of this text, any line if it is a line end, None: nothing does."""
        return "\n" if self.documents == "lines" else self.document_separator

    @field_validator("split")
    @classmethod
    def _shares(cls, split: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(split) < 0 or split[0] <= 0 or abs(sum(split) - 1) > 1e-6:
            raise ValueError(f"must be three shares of at least 0 that add up to 1 (these add up to {sum(split):g})")
        return split


class OptimConfig(_Frozen):
    """The optimizer and its learning-rate schedule."""

    optimizer: Literal["adamw", "adam", "sgd", "muon", "lamb"] = Field(
        default="adamw", description="muon: matrices, AdamW: the rest; lamb: NVIDIA's form, for large batches"
    )
    lr: Annotated[float, Field(gt=0)] = Field(default=2.5e-4, description="largest learning rate")
    adamw_lr: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="muon: rate of the AdamW part; None means lr"
    )
    betas: tuple[Probability, Probability] = Field(default=(0.9, 0.999), description="Adam's and LAMB's decay rates")
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="Adam's and LAMB's denominator term")
    embedding_lr_ratio: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="rate of the embedding / rate of the others (muon: / adamw_lr)"
    )
    momentum: Probability = Field(default=0.95, description="sgd and muon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="of what decayed says; decoupled with adamw, muon and lamb"
    )
    decayed: Literal["matrices", "layers", "all"] = Field(
        default="matrices", description="matrices: embeddings and softmax too; layers: only matrices of layers; all: everything"
    )
    clip: Annotated[float, Field(gt=0)] | None = Field(
        default=0.25, description="largest global gradient norm; None: no clipping"
    )
    schedule: Literal["cosine", "linear", "inv_sqrt", "constant", "plateau"] = Field(
        default="cosine", description="shape after warm-up"
    )
    warmup_steps: Natural = Field(default=0, description="steps of linear warm-up")
    decay_after_warmup: bool = Field(
        default=False, description="cosine, linear: decay begins after warm-up, as in TensorFlow and NVIDIA's, not beneath it"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="final rate / lr")
    plateau_factor: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.5, description="plateau: multiply the rate by this …")
    plateau_patience: Natural = Field(default=2, description="… after so many validations without improvement")


class TrainConfig(_Frozen):
    """The loop: how much, how often, on what."""

    batch_size: Positive = Field(default=16, description="parallel lanes of text (in all processes together)")
    tgt_len: Positive = Field(default=128, description="tokens per segment and lane; gradients reach this far back")
    accumulate: Positive = Field(default=1, description="groups of lanes computed one after another per step, to save memory")
    max_steps: Positive | None = Field(default=None, description="budget; training ends at the first budget that is used up")
    max_tokens: Positive | None = Field(default=None, description="budget in training tokens")
    max_epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="budget in passes over the training split"
    )
    max_minutes: Annotated[float, Field(gt=0)] | None = Field(default=None, description="budget in minutes of training steps")
    reset_at_documents: bool = Field(default=False, description="training: a new document starts with an empty memory")
    seed: Natural = Field(default=0, description="of weights and dropout")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N, mps")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(default="auto", description="auto: what the processor does fast")
    log_interval: Positive = Field(default=50, description="steps between lines of metrics.jsonl")
    eval_interval: Positive = Field(default=1000, description="steps between validations (each with a sample)")
    checkpoint_interval: Positive = Field(default=500, description="steps between checkpoints")
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(
        default=2, description="newest checkpoints kept; the best is kept too"
    )
    sample_tokens: Natural = Field(default=200, description="tokens of the sample written at each validation")
    max_bad_steps: Positive = Field(default=10, description="steps in a row without a finite gradient before giving up")
    tbptt_segments: Positive = Field(
        default=1, description="consecutive segments per update; gradients reach back through the memory between them"
    )
    tgt_len_start: Positive | None = Field(
        default=None, description="tokens of the first segments, which grow to tgt_len; None: tgt_len from the start"
    )
    tgt_len_warmup: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.25, description="share of the budget over which segments grow from tgt_len_start"
    )
    tgt_len_increment: Positive = Field(default=8, description="tokens by which they grow at a time")
    varlen: bool = Field(default=False, description="segments of random length around tgt_len, as the authors' varlen")
    attention: str = Field(default="auto", description="how attention is computed: auto, or the name of a backend")
    checkpoint_layers: bool = Field(
        default=False, description="compute layers again in the backward pass instead of keeping their activations"
    )
    parallel: Parallelism = Field(
        default="ddp", description="several processes: ddp: each holds the whole model; fsdp: each holds a part of everything"
    )
    compile: bool = Field(default=False, description="compile the model's part of a step with torch.compile")
    deterministic: bool = Field(default=False, description="only algorithms that give the same bits every time")
    average: Literal["none", "ema", "swa"] = Field(
        default="none", description="keep an average of the weights, too: of all steps, fading, or of the last ones, equally"
    )
    average_decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.999, description="ema: what is left of the average after a step"
    )
    average_start: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.75, description="swa: share of the budget after which averaging begins"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate ({self.accumulate}) must divide batch_size ({self.batch_size})")
        if self.tgt_len_start is not None and self.tgt_len_start > self.tgt_len:
            raise ValueError(
                f"tgt_len_start ({self.tgt_len_start}) must be at most tgt_len ({self.tgt_len}), to which segments grow"
            )
        if self.deterministic and self.attention == "flex":
            raise ValueError("attention (flex) adds gradients in any order, and deterministic (True) forbids that; use auto")
        if not (self.max_steps or self.max_tokens or self.max_epochs or self.max_minutes):
            raise ValueError("no budget: set one of max_steps, max_tokens, max_epochs, max_minutes")
        return self


class EvalConfig(_Frozen):
    """How validation and `txl eval` read; `None` means as in training."""

    tgt_len: Positive | None = Field(default=None, description="tokens per segment")
    mem_len: Natural | None = Field(default=None, description="positions of memory")
    batch_size: Positive = Field(default=8, description="lanes read side by side, each warmed up on the text before it")
    clamp_len: Positive | None = Field(default=None, description="largest distance told apart")
    same_length: bool | None = Field(default=None, description="the same number of keys for every query")
    ext_len: Natural = Field(default=0, description="tokens before each segment read again with it, and remembered only then")
    max_tokens: Positive | None = Field(default=200_000, description="validation in training reads at most so many tokens")


class RunConfig(_Frozen):
    """Everything that defines a run."""

    name: str = Field(default="run", description="name of the recipe")
    description: str = Field(default="", description="what the recipe is for, in one line")
    source: str = Field(default="", description="where its settings come from")
    model: TransformerXLConfig = Field(default_factory=TransformerXLConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=lambda: TrainConfig(max_steps=1000))
    eval: EvalConfig = Field(default_factory=EvalConfig)

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.train.reset_at_documents and self.model.zero_first_memory:
            raise ValueError(
                "train.reset_at_documents (True) begins documents with an empty memory, model.zero_first_memory (True) streams "
                "with one of zeros; use one of them"
            )
        if self.train.attention != "auto" and self.model.attention != AttentionKind.TRANSFORMER_XL:
            raise ValueError(
                f"train.attention ({self.train.attention}) chooses among the ways to compute model.attention=transformer_xl; "
                f"{self.model.attention} has one: use train.attention=auto"
            )
        return self

    @property
    def eval_tgt_len(self) -> int:
        """Tokens per segment in evaluation."""
        return self.eval.tgt_len or self.train.tgt_len

    @property
    def eval_mem_len(self) -> int:
        """Positions of memory in evaluation."""
        return self.model.mem_len if self.eval.mem_len is None else self.eval.mem_len


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    folder = resources.files("transformer_xl") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(recipe: str, overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe by name or path and apply `section.key=value` overrides.

    Args:
        recipe: a name from `recipe_names()`, or the path of a TOML file.
        overrides: for example `["train.max_minutes=1", "model.dropout=0"]`; values are TOML, `none` clears a value, and what
            is not TOML is taken as text.

    Returns:
        The validated run.

    Raises:
        ConfigError: no such recipe, unreadable TOML, an unknown key, or a value that cannot work.

    Example:
        >>> load_recipe("quickstart", ["train.max_minutes=0.5"]).train.max_minutes
        0.5
    """
    path = Path(recipe)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"recipe file '{recipe}' does not exist; recipes that come with txl: {', '.join(recipe_names())}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe file '{recipe}' cannot be read: {error}") from None
    elif recipe in recipe_names():
        text = (resources.files("transformer_xl") / "recipes" / f"{recipe}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"unknown recipe '{recipe}'; {did_you_mean(recipe, recipe_names())}")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe '{recipe}' is not valid TOML: {error}") from None
    return apply_overrides({"name": path.stem, **values}, overrides or [])


def apply_overrides(values: dict[str, Any], overrides: list[str]) -> RunConfig:
    """Validate `values` as a run after applying `section.key=value` overrides."""
    for override in overrides:
        values = merge(values, parse_override(override))
    return RunConfig(**values)


def parse_override(override: str) -> dict[str, Any]:
    """Turn `section.key=value` into nested tables; the value is TOML, `none`, or else text.

    Example:
        >>> parse_override("train.max_steps=1000")
        {'train': {'max_steps': 1000}}
    """
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set '{override}' must have the form section.key=value, such as train.max_steps=1000")
    nested: Any = _parse_value(value.strip())
    for part in reversed(key.strip().split(".")):
        nested = {part: nested}
    return nested


def merge(base: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `update` laid over it, tables merged key by key.

    Example:
        >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
        {'a': {'x': 1, 'y': 3}}
    """
    merged = dict(base)
    for key, value in update.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _parse_value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _one_line(settings: type[BaseModel], error: ValidationError) -> str:
    """Say every problem in one line, each with its key, its value and what would be right."""
    return "; ".join(_problem(settings, problem) for problem in error.errors())


def _problem(settings: type[BaseModel], problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'; {did_you_mean(key, settings.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    value = problem["input"]
    if isinstance(value, dict | BaseModel):  # a section, whose own message names the key, or a rule about several keys
        return f"{key}: {message}" if key else message
    return f"{key} ({value!r}) {message}"
