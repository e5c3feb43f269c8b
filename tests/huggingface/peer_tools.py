"""What minicons and inseq make of a model of ours, unchanged; in the environment of tools-requirements.txt, see test_tools.py.

    .venv-tools/bin/python tests/huggingface/peer_tools.py DIRECTORY REQUEST

The request is JSON, and so is the last line that is printed. Texts have several lengths, so batches are padded, by minicons at
the right, by inseq at the left.
"""

import json
import sys
from typing import Any

import inseq
from minicons import scorer

import transformer_xl.huggingface  # noqa: F401  # registers the classes


def main(directory: str, request: dict[str, Any]) -> None:
    """Print what the two say."""
    texts, prompts = request["texts"], request["prompts"]
    model = scorer.IncrementalLMScorer(directory, "cpu")
    answer: dict[str, Any] = {
        "tokens": model.token_score(texts),
        "sequences": model.sequence_score(texts, reduction=lambda x: x.sum(0).item()),
        "conditional": model.conditional_score(*request["conditional"], reduction=lambda x: x.sum(0).item()),
        "words": model.word_score_tokenized(texts[:1], str.split),
        "next": model.next_word_distribution(prompts).tolist(),
    }
    for method in request["methods"]:
        reader = inseq.load_model(directory, method)
        out = reader.attribute(prompts, generation_args={"max_new_tokens": 2, "do_sample": False}, show_progress=False)
        answer[method] = [
            {"ids": [token.id for token in each.target], "weights": each.target_attributions.nan_to_num(0).tolist()}
            for each in out.sequence_attributions
        ]
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
