"""Words cost what the package wordsprobability says. `make_goldens_words.py` wrote its figures and the scores behind them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_xl.inference.softmax import FrozenSoftmax
from transformer_xl.model.softmax import TokenEmbedding, TokenSoftmax
from transformer_xl.reading.rows import Borders, Line, ScoredLine, word_rows
from transformer_xl.tokenizers.bpe import BPETokenizer

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "words" / "expected.json").read_text(encoding="utf-8"))


def frozen_softmax(vectors: torch.Tensor, bias: torch.Tensor) -> FrozenSoftmax:
    n_token, width = vectors.shape
    softmax = TokenSoftmax(n_token, d_embed=width, d_model=width, tied=False)
    assert softmax.weight is not None
    with torch.no_grad():
        softmax.weight.copy_(vectors)
        softmax.bias.copy_(bias)
    return FrozenSoftmax(softmax, TokenEmbedding(n_token, d_embed=width, d_model=width, scale=1.0), "fp32")


@pytest.mark.parametrize("golden", GOLDEN["lines"], ids=lambda line: line["text"][:12])
def test_words_of_a_line_that_a_line_end_ends(golden: dict) -> None:
    """The package divides by the probability that a line begins without a space; `txl` does not ask how a line begins."""
    tokenizer = BPETokenizer(GOLDEN["library"])
    borders, states = Borders(tokenizer), torch.tensor(GOLDEN["states"])
    (line_end,) = tokenizer.encode("\n")
    ids, starts, stops = tokenizer.encode_with_offsets(golden["text"])
    softmax = frozen_softmax(torch.tensor(GOLDEN["vectors"]), torch.tensor(GOLDEN["bias"]))
    event, labels = borders.event, torch.from_numpy(np.append(ids, line_end))
    assert event is not None
    with torch.no_grad():
        nats, ends = softmax.nll_and_event(states[np.append(line_end, ids)], labels, torch.from_numpy(event)).numpy()
    line = ScoredLine(Line(1, golden["text"], ids, starts, stops), nats[:-1], ends)
    found = list(word_rows([line], borders))
    expected = np.array(golden["surprisal"])
    expected[0] += golden["bos_fix"]
    assert [row["text"] for row in found] == golden["text"].split()
    np.testing.assert_allclose([row["nats"] for row in found], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([row["nats_prefix"] for row in found], golden["surprisal_buggy"], rtol=1e-5, atol=1e-5)
