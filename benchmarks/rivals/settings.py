"""Settings of the rivals; nothing of their libraries is needed to read them."""

from typing import ClassVar, Literal, Self

from pydantic import Field

from transformer_xl.config.model import LstmConfig, ModelConfig
from transformer_xl.config.settings import Natural, Positive


class LstmNgramsConfig(LstmConfig):
    """Our LSTM with tables of pairs, triples and so on, to tell what the tables of `ngram_rows` do from what memory does."""

    kind: ClassVar[str] = "lstm_ngrams"

    ngram_rows: tuple[Positive, ...] = Field(
        min_length=1, strict=False, description="rows of a table of vectors of pairs of tokens, of one of triples, and so on"
    )


class XTransformersConfig(ModelConfig):
    """A decoder of x-transformers with rotary positions, which attends to the hidden states of the segment before (`mems`)."""

    kind: ClassVar[str] = "x_transformers"

    n_head: Positive = Field(default=8, description="attention heads per layer")
    d_head: Positive = Field(default=64, description="width of one head")
    d_inner: Positive = Field(default=2048, description="width of the feed-forward layer")
    shift_tokens: Natural = Field(
        default=0, description="1: half of the channels come from the token before, in every layer; 0: none"
    )
    mem_len: Natural = Field(default=512, description="positions of memory kept per layer (tokens)")


class XlstmConfig(ModelConfig):
    """A stack of mLSTM blocks (xLSTM, Beck et al. 2024, arXiv 2405.04517), whose state is a matrix per head."""

    kind: ClassVar[str] = "xlstm"
    remembers: ClassVar[Literal["positions", "state", "nothing"]] = "state"

    n_head: Positive = Field(default=4, description="heads per layer")
    d_inner: Positive = Field(default=2048, description="width of the feed-forward layer")
    chunk_size: Positive = Field(default=64, description="tokens that training computes at once; it divides train.tgt_len")
    mem_len: Natural = Field(
        default=1, description="1: the state is carried from segment to segment; 0: each begins without one"
    )

    @property
    def embedding_scale(self) -> float:
        """1: the vectors of tokens are taken as they are."""
        return 1.0

    def completed(self, *, vocab_size: int, tgt_len: int) -> Self:
        """Return these settings with the vocabulary; a segment of training must be whole chunks."""
        if tgt_len % self.chunk_size:
            raise ValueError(f"train.tgt_len ({tgt_len}) must be a multiple of model.chunk_size ({self.chunk_size})")
        return self._with(vocab_size=vocab_size)


class MistralConfig(ModelConfig):
    """Mistral of transformers: rotary positions, a sliding window, gated feed-forward layers.

    It trains on separate segments, as its users do, and reads a text as a stream, through the library's cache of the window.
    """

    kind: ClassVar[str] = "mistral"

    n_head: Positive = Field(default=8, description="attention heads per layer, each with keys of its own")
    d_head: Positive = Field(default=64, description="width of one head")
    d_inner: Positive = Field(default=1408, description="width of the feed-forward layer")
    mem_len: Natural = Field(default=127, description="tokens that a token sees besides itself: the sliding window less one")

    @property
    def embedding_scale(self) -> float:
        """1: the vectors of tokens are taken as they are."""
        return 1.0

    @property
    def numbers_per_position(self) -> int:
        """A key and a value per head and layer."""
        return 2 * self.n_layer * self.n_head * self.d_head
