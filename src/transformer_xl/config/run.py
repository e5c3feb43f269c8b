"""What a run is: validated, frozen settings, in sections.

Unknown keys fail with the nearest known name. Modules get plain arguments; only the code that builds them for a run sees these
classes.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, FieldSerializationInfo, PositiveFloat, field_serializer, field_validator, model_validator

from transformer_xl.config.model import STAND_ALONE, ModelConfig, TextSettings, TransformerXLConfig, model_config
from transformer_xl.config.settings import Natural, Positive, Probability, Section

Parallelism = Literal["ddp", "fsdp"]


class TokenizerConfig(Section):
    """How text becomes ids."""

    kind: Literal["byte", "char", "word", "bpe", "unigram", "ids"] = Field(
        default="byte", description="unit of text; ids: the corpus is files of ids, .npy, .npz or .jsonl"
    )
    vocab_size: Positive | None = Field(
        default=None, description="bpe, unigram: vocabulary size (default 8192); word: largest size; ids: found if not given"
    )
    pad_id: Annotated[int, Field(ge=-(2**31), lt=2**31)] | Literal["auto"] | None = Field(
        default="auto",
        description="ids: what fills up rows at their ends and is left out; auto: found, and said; none: nothing",
    )
    min_frequency: Natural = Field(default=0, description="word: rarer words become <unk>; bpe: rarer pairs are not merged")
    lower_case: bool = Field(default=False, description="word: fold case; unigram: the same, with normalization xlnet")
    byte_fallback: bool = Field(default=False, description="char, unigram: write characters that the corpus lacks as bytes")
    normalization: Literal["spaces", "xlnet"] = Field(
        default="spaces",
        description="unigram: xlnet: plain quotes, characters taken apart without accents, commas apart from digits",
    )
    keep_accents: bool = Field(default=False, description="unigram: with normalization xlnet, leave characters as they are")


class DataConfig(Section):
    """Where the text comes from and how it is divided."""

    corpus: str = Field(default="python-stdlib", min_length=1, description="name, file, directory or glob, of text or of ids")
    split: tuple[float, float, float] = Field(
        default=(0.9, 0.05, 0.05), strict=False, description="train, valid, test shares when none is given"
    )
    directory: str | None = Field(default=None, description="where a named corpus lies; None: $TXL_DATA, else downloaded")
    document_separator: str | None = Field(default=None, description="a line that divides documents inside a file")
    documents: Literal["files", "lines"] = Field(
        default="files", description="files: each is a document, or several by document_separator; lines: each line is one"
    )
    shuffle: Literal["none", "documents"] = Field(
        default="none", description="training: documents in another order every epoch, drawn from train.seed"
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
        """The line that divides documents inside a file; a line end: every line is a document; None: nothing divides them."""
        return "\n" if self.documents == "lines" else self.document_separator

    @field_validator("split")
    @classmethod
    def _shares(cls, split: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(split) < 0 or split[0] <= 0 or abs(sum(split) - 1) > 1e-6:
            raise ValueError(f"must be three shares of at least 0 that add up to 1 (these add up to {sum(split):g})")
        return split


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    optimizer: Literal["adamw", "adam", "sgd", "muon", "lamb"] = Field(
        default="adamw", description="muon: matrices, AdamW: the rest; lamb: NVIDIA's form, for large batches"
    )
    lr: PositiveFloat = Field(default=2.5e-4, description="largest learning rate")
    adamw_lr: PositiveFloat | None = Field(default=None, description="muon: rate of the AdamW part; None means lr")
    betas: tuple[Probability, Probability] = Field(
        default=(0.9, 0.999), strict=False, description="Adam's and LAMB's decay rates"
    )
    eps: PositiveFloat = Field(default=1e-8, description="Adam's and LAMB's denominator term")
    embedding_lr_ratio: PositiveFloat = Field(
        default=1.0, description="rate of the embedding / rate of the others (muon: / adamw_lr)"
    )
    momentum: Probability = Field(default=0.95, description="sgd, muon: share of the direction that is kept from step to step")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="weight decay; `decayed` says for which weights; decoupled with adamw, muon and lamb"
    )
    decayed: Literal["matrices", "layers", "all"] = Field(
        default="matrices", description="matrices: embeddings and softmax too; layers: only matrices of layers; all: everything"
    )
    layer_lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="the rate of each layer / that of the layer above; embeddings have the lowest (fine-tuning)"
    )
    layer_lr_decay_on: Literal["rate", "gradient"] = Field(
        default="rate", description="rate: as XLNet's paper defines it; gradient: as its code does, which Adam hardly notices"
    )
    clip: PositiveFloat | None = Field(default=0.25, description="largest global gradient norm; None: no clipping")
    schedule: Literal["cosine", "linear", "inv_sqrt", "constant", "plateau"] = Field(
        default="cosine", description="shape after warm-up; plateau: half the rate after each 3 validations without improvement"
    )
    warmup_steps: Natural = Field(default=0, description="steps of linear warm-up")
    warmup_share: Probability = Field(
        default=0.0, description="share of the budget that is linear warm-up, from 0 on; instead of warmup_steps"
    )
    decay_after_warmup: bool = Field(
        default=False, description="cosine, linear: decay begins after warm-up, as in TensorFlow and NVIDIA's, not beneath it"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="final rate / lr")
    lr_by_length: bool = Field(
        default=False, description="a step's rate is in proportion to the length of its segments: lr is that of train.tgt_len"
    )

    @model_validator(mode="after")
    def _one_warmup(self) -> "OptimConfig":
        if self.warmup_steps and self.warmup_share:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_share ({self.warmup_share:g}) both warm up; use one"
            )
        return self


class TrainConfig(Section):
    """The loop: how much, how often, on what."""

    batch_size: Positive = Field(default=16, description="parallel lanes of text (in all processes together)")
    tgt_len: Positive = Field(default=128, description="tokens per segment and lane; gradients reach this far back")
    accumulate: Positive = Field(default=1, description="groups of lanes computed one after another per step, to save memory")
    max_steps: Positive | None = Field(
        default=None, description="budget in steps; training ends at the first budget that is used up"
    )
    max_tokens: Positive | None = Field(default=None, description="budget in training tokens")
    max_epochs: PositiveFloat | None = Field(default=None, description="budget in passes over the training split")
    max_minutes: PositiveFloat | None = Field(default=None, description="budget in minutes of training steps")
    reset_at_documents: bool = Field(default=False, description="training: a new document starts with an empty memory")
    seed: Natural = Field(default=0, description="random seed of weights and dropout")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N, mps")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(default="auto", description="auto: what the processor does fast")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="threads on a CPU; none: PyTorch's choice"
    )
    log_interval: Positive = Field(default=50, description="steps between lines of metrics.jsonl")
    eval_interval: Positive = Field(
        default=1000,
        description="steps between validations (each with a sample); before, a run that time ends has one at each quarter",
    )
    checkpoint_interval: Positive = Field(default=500, description="steps between checkpoints")
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(
        default=2, description="newest checkpoints kept; the best is kept too"
    )
    sample_tokens: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=200, description="tokens of the sample written at each validation"
    )
    max_bad_steps: Positive = Field(default=10, description="steps in a row without a finite gradient before giving up")
    tbptt_segments: Positive = Field(
        default=1, description="consecutive segments per update; gradients reach back through the memory between them"
    )
    loss: Literal["full", "half", "answer"] = Field(
        default="full",
        description="tokens learned from; half: the later half of each segment; answer: what follows a document's first tab",
    )
    label_smoothing: Probability = Field(
        default=0.0, description="share of the loss in which every token of the vocabulary is as right as the one that follows"
    )
    activation_penalty: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="added to the loss: this times the mean square of the last layer's states (AR)"
    )
    temporal_penalty: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="added to the loss: this times the mean square of their changes from token to token (TAR)"
    )
    varlen: bool = Field(default=False, description="segments of random length around tgt_len, as the authors' varlen")
    attention: str = Field(default="auto", description="how attention is computed: auto, or the name of a backend")
    checkpoint_layers: bool = Field(
        default=False, description="compute layers again in the backward pass instead of keeping their activations"
    )
    parallel: Parallelism = Field(
        default="ddp", description="several processes: ddp: each holds the whole model; fsdp: each holds a part of everything"
    )
    compile: bool = Field(default=False, description="compile the model's part of a step with torch.compile")
    graph: Literal["auto", "on", "off"] = Field(
        default="auto", description="launch a step's kernels together, as a CUDA graph; auto: on a GPU, where that is possible"
    )
    deterministic: bool = Field(default=False, description="only algorithms that give the same bits every time")
    lora_rank: Positive | None = Field(
        default=None, description="with `--from`: only low-rank adapters of this rank learn, beside weights that stay (LoRA)"
    )
    lora_alpha: PositiveFloat = Field(
        default=16.0, description="LoRA: what an adapter adds counts lora_alpha / lora_rank times"
    )
    average: Literal["none", "ema", "swa"] = Field(
        default="none",
        description="also keep an average of the weights; ema: of all steps, fading; swa: of the last steps, equally",
    )
    average_decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.999, description="ema: factor of the old average at each step"
    )
    average_start: Probability = Field(default=0.75, description="swa: share of the budget after which averaging begins")

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate ({self.accumulate}) must divide batch_size ({self.batch_size})")
        if self.lora_rank is not None and self.parallel == "fsdp":
            raise ValueError(f"lora_rank ({self.lora_rank}) cannot be combined with parallel (fsdp); use ddp")
        if not (self.max_steps or self.max_tokens or self.max_epochs or self.max_minutes):
            raise ValueError("no budget: set one of max_steps, max_tokens, max_epochs, max_minutes")
        return self


class EvalConfig(Section):
    """How validation and `txl eval` read; `None` means as in training."""

    tgt_len: Positive | None = Field(default=None, description="tokens per segment")
    mem_len: Natural | None = Field(
        default=None, description="positions of memory per layer (tokens); None: a token also sees as much as in training"
    )
    batch_size: Positive = Field(default=8, description="lanes read side by side, each warmed up on the text before it")
    clamp_len: Positive | None = Field(default=None, description="largest distance told apart (tokens)")
    same_length: bool | None = Field(default=None, description="the same number of keys for every query")
    ext_len: Natural = Field(
        default=0, description="tokens before each segment that are read again with it, and enter the memory only then"
    )
    max_tokens: Positive | None = Field(default=200_000, description="validation in training reads at most this many tokens")


class TaskConfig(TextSettings):
    """What `txl finetune` teaches, and from which texts."""

    kind: Literal["classification", "multilabel", "regression", "choice", "span", "tokens"] = Field(
        description="what a text gets: a class, any of several labels, a number, a choice among texts, a place that answers, "
        "or a label of each word"
    )
    base: str = Field(default="", description="run, directory or hub id of the model that fine-tuning begins with")
    data: str = Field(default="", description="file, or directory with train, dev and test files or with a directory per class")
    valid: str | None = Field(default=None, description="file to validate on; None: that of the directory, or a tenth of data")
    test: str | None = Field(default=None, description="file to score at the end; None: that of the directory, if there is one")
    text: str | None = Field(default=None, description="column of the text, or of its words; None: found by its name")
    pair: str | None = Field(default=None, description="column of the second text; None: found by its name, if there is one")
    label: tuple[str, ...] = Field(
        default=(), strict=False, description="column of the label, several for multilabel; empty: found by its name"
    )
    class_weights: Literal["balanced"] | None = Field(
        default=None, description="factors on the losses of classes: balanced: rare ones count as much as frequent ones"
    )
    document: str | None = Field(
        default=None,
        description="column of the document that a row belongs to, whose rows are read in order, with memory; files: each file "
        "is a document; None: rows stand alone",
    )
    patience: Positive | None = Field(default=None, description="validations without improvement after which training ends")

    @model_validator(mode="after")
    def _has_classes(self) -> Self:
        if self.class_weights and self.kind not in ("classification", "tokens"):
            raise ValueError(
                f"class_weights ({self.class_weights}) is for classification and labels of words, not {self.kind}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _reads_documents(self) -> "TaskConfig":
        if self.document is not None and self.kind in STAND_ALONE:
            raise ValueError(
                f"document ({self.document!r}) does not go with kind ({self.kind}), whose texts stand alone; leave it out"
            )
        return self


def merge(base: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `update`, tables merged key by key.

    Example:
        >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
        {'a': {'x': 1, 'y': 3}}
    """
    merged = dict(base)
    for key, value in update.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


class RunConfig(Section):
    """Everything that defines a run."""

    name: str = Field(default="run", description="name of the recipe")
    description: str = Field(default="", description="what the recipe is for, in one line")
    source: str = Field(default="", description="where its settings come from")
    compared_with: str | None = Field(
        default=None,
        description="recipe whose model this one is compared with; their numbers of parameters are shown side by side",
    )
    base: str | None = Field(
        default=None, description="of `txl train --from`: the run, directory or hub id whose weights training begins with"
    )
    model: ModelConfig = Field(default_factory=TransformerXLConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=lambda: TrainConfig(max_steps=1000))
    eval: EvalConfig = Field(default_factory=EvalConfig)
    task: TaskConfig | None = Field(default=None, description="of `txl finetune`; None: a language model is trained")

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, name: str) -> str:
        if name in ("", ".", "..") or "/" in name:
            raise ValueError("must be a name without '/', because the directory of the run has it")
        return name

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_kind(cls, values: Any) -> Any:
        return model_config(values) if isinstance(values, dict) else values

    @field_serializer("model")
    def _with_its_kind(self, model: ModelConfig, info: FieldSerializationInfo) -> dict[str, Any]:
        return {"kind": model.kind, **model.model_dump(mode=info.mode)}

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.train.reset_at_documents and self.model.begins_with_zeros:
            raise ValueError(
                "train.reset_at_documents (True) begins documents with an empty memory, model.zero_first_memory (True) streams "
                "with one of zeros; use one of them"
            )
        if self.train.lora_rank is not None and self.base is None and self.task is None:
            raise ValueError(
                f"train.lora_rank ({self.train.lora_rank}) adapts a model that has learned already; name it with --from"
            )
        if self.model.predicts == "target":
            self._check_rows(f"model.kind ({self.model.kind}), which reads rows of two texts")
        if self.task is not None:
            self._check_rows(f"task.kind ({self.task.kind}), which reads each text to its end")
        return self

    def _check_rows(self, what: str) -> None:
        """Refuse settings of streams that are cut into segments, where rows are read whole; `what` reads them."""
        plain = {
            "train.varlen": not self.train.varlen,
            "train.loss": self.train.loss == "full",
            "train.label_smoothing": not self.train.label_smoothing,
            "train.activation_penalty": not self.train.activation_penalty,
            "train.temporal_penalty": not self.train.temporal_penalty,
            "train.reset_at_documents": not self.train.reset_at_documents,
            "optim.lr_by_length": not self.optim.lr_by_length,
            "eval.tgt_len": self.eval.tgt_len in (None, self.train.tgt_len),
            "eval.clamp_len": self.eval.clamp_len is None,
            "eval.same_length": self.eval.same_length is None,
            "eval.ext_len": self.eval.ext_len == 0,
        }
        if unfit := next((name for name, fits in plain.items() if not fits), None):
            section, name = unfit.split(".")
            value = getattr(getattr(self, section), name)
            raise ValueError(f"{unfit} ({value}) does not go with {what}")

    def changed(self, **sections: dict[str, Any]) -> "RunConfig":
        """Return these settings with other values in some sections, checked again.

        Args:
            sections: by the name of a section, the values that change.

        Raises:
            ConfigError: a value cannot work.
        """
        return RunConfig(**merge(self.model_dump(), sections))

    @property
    def predicts(self) -> str:
        """What a score of this run counts: each token, an XLNet's targets, or the tokens of answers."""
        return "answer token" if self.train.loss == "answer" else self.model.predicts

    @property
    def eval_tgt_len(self) -> int:
        """Tokens per segment in evaluation."""
        return self.eval.tgt_len or min(self.train.tgt_len, self.model.longest_segment or self.train.tgt_len)

    @property
    def eval_mem_len(self) -> int:
        """Positions of memory in evaluation; with segments shorter than in training as many more, unless that is set, too."""
        same_length = getattr(self.model, "same_length", False) if self.eval.same_length is None else self.eval.same_length
        if self.eval.mem_len is not None:
            return self.eval.mem_len
        if self.eval.tgt_len is None or same_length or not self.model.mem_len or self.model.remembers != "positions":
            return self.model.mem_len
        return self.model.mem_len + max(0, self.train.tgt_len - self.eval.tgt_len - self.eval.ext_len)
