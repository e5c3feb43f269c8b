"""Write what the package wordsprobability says of the words of some lines: with the end of each word, and without.

    python -m venv .venv-words && .venv-words/bin/pip install -r tests/parity/requirements-words.txt
    .venv-words/bin/python tests/parity/make_goldens_words.py

The model predicts by the last token alone: the scores of what follows token i are `vectors` · states[i] + `bias`. The package
takes white space other than spaces for a part of words, so it has no probability here, but for the line end beside a line.
"""

import json
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from wordsprobability.main import agg_surprisal_per_word
from wordsprobability.models import bow_lm

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

GOLDEN = Path(__file__).resolve().parent / "goldens" / "words" / "expected.json"
VOCAB_SIZE, WIDTH = 290, 4
LINE_END = "Ċ"  # as GPT-2 writes it
UNITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"  # those of `txl`, not of GPT-2
LINES = [
    "The probability of a word is that of its tokens and its end.",
    "a",
    'It\'s 1984; "naïve" x+1 (東京), indeed!',
    "Words that the model has never seen: zyzzyva qat.",
]


def trained() -> Tokenizer:
    """Return a byte-level BPE, as `txl` trains one."""
    library = Tokenizer(models.BPE())
    parts = [
        pre_tokenizers.Split(Regex(UNITS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    library.pre_tokenizer = pre_tokenizers.Sequence(parts)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(LINES, trainer)
    return library


class Bigrams(torch.nn.Module):
    """Scores by the last token alone."""

    def __init__(self, library: Tokenizer) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        states, vectors = torch.randn(2, VOCAB_SIZE, WIDTH, generator=generator).mul(100).round().div(100)
        bias = torch.zeros(VOCAB_SIZE)
        for token, index in library.get_vocab().items():
            text = library.decode([index])
            if token != LINE_END and text[:1] != " " and text[:1].isspace():
                bias[index] = -1000.0
        self.states, self.vectors, self.bias = states, vectors, bias
        self.device = torch.device("cpu")

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.states[ids] @ self.vectors.T + self.bias
        return {"logits": logits, "loss": torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])}


class OfGolden(bow_lm.BaseBOWModel):
    """The package's own arithmetic over these scores."""

    def __init__(self, library: Tokenizer) -> None:
        self.library = library
        super().__init__()

    def _initialise_model(self) -> tuple[Any, Any]:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.library, bos_token=LINE_END, eos_token=LINE_END)
        return Bigrams(self.library), tokenizer

    def _get_n_logits(self) -> int:
        return VOCAB_SIZE


def hundredths(x: Tensor) -> list[list[float]]:
    """Return a matrix, written short."""
    return [[round(value, 2) for value in row] for row in x.tolist()]


def main() -> None:
    library = trained()
    saved = json.loads(library.to_str())
    model = OfGolden(library)
    frames = []
    for number, line in enumerate(LINES):
        results, offsets = model.get_predictions(line)
        frames.append(pandas.DataFrame(results).assign(text_id=number, offsets=offsets))
    tokens = pandas.concat(frames)
    at_start = tokens.groupby("text_id")["bos_fix"].first()
    words = agg_surprisal_per_word(tokens, "gpt2-small", return_buggy_surprisals=True).reset_index()
    golden = {
        "library": saved,
        "states": hundredths(model.model.states),
        "vectors": hundredths(model.model.vectors),
        "bias": model.model.bias.tolist(),
        "lines": [
            {
                "text": line,
                "surprisal": words[words.text_id == number].surprisal.tolist(),
                "surprisal_buggy": words[words.text_id == number].surprisal_buggy.tolist(),
                "bos_fix": float(at_start[number]),
            }
            for number, line in enumerate(LINES)
        ],
    }
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
