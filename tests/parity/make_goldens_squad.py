"""Write what the official scripts of SQuAD 1.1 and 2.0 say of made-up predictions.

    python tests/parity/make_goldens_squad.py DIRECTORY

DIRECTORY holds `evaluate-v1.1.py` and `evaluate-v2.0.py` of rajpurkar.github.io/SQuAD-explorer; nothing else is needed.
"""

import importlib.util
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parent / "goldens" / "squad" / "scores.json"
WORDS = [
    "the",
    "a",
    "An",
    "cat",
    "cats",
    "Cat's",
    "sat",
    "on",
    "U.S.",
    "US",
    "1,000",
    "1000",
    "--",
    "naïve",
    "é",
    "theatre",
    "東",
    "!",
    ".",
]
SPACES = [" ", " ", " ", "  ", "\n", "\t", "-", "\xa0"]


def text(draw: random.Random, most: int) -> str:
    parts = [draw.choice(WORDS) + draw.choice(SPACES) for _ in range(draw.randint(1, most))]
    return "".join(parts).strip() or "cat"


def near(draw: random.Random, answer: str) -> str:
    """Return an answer like another, or any."""
    return draw.choice(
        [answer, answer.upper(), f"the {answer}!", answer[1:], answer[:-2], f"{answer} {text(draw, 2)}", text(draw, 5)]
    )


def drawn_questions(seed: int, n: int, *, impossible: float) -> list[dict[str, Any]]:
    """Return questions with right answers, what was said, and the probability of no answer; no two of these are the same."""
    draw, made = random.Random(seed), []
    levels = draw.sample(range(1, 10_000), n)
    for i in range(n):
        golds = [] if draw.random() < impossible else [text(draw, 4) for _ in range(draw.randint(1, 3))]
        said = draw.choice(["", text(draw, 3)]) if not golds else near(draw, draw.choice(golds)) if draw.random() < 0.9 else ""
        golds += ["cat"] if golds and not said else []  # the scripts contradict themselves where no right answer has words
        no_answer = levels[i] / 10_000
        if draw.random() < 0.6:  # right more often than not
            no_answer = no_answer / 2 if golds else (1 + no_answer) / 2
        made.append({"id": str(i), "answers": golds, "said": said, "no_answer": round(no_answer + i / 10**7, 9)})
    assert len({each["no_answer"] for each in made}) == n
    return made


def dataset(asked: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    qas = [{"id": each["id"], "answers": [{"text": answer} for answer in each["answers"]]} for each in asked]
    return [{"paragraphs": [{"qas": qas}]}]


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_").replace(".", "_"), path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def of_version_1(script: Any, asked: list[dict[str, Any]]) -> dict[str, Any]:
    scores = script.evaluate(dataset(asked), {each["id"]: each["said"] for each in asked})
    pairs = [
        [float(script.exact_match_score(each["said"], gold)), float(script.f1_score(each["said"], gold))]
        for each in asked
        for gold in each["answers"]
    ]
    return {"questions": asked, "scores": scores, "pairs": pairs}


def of_version_2(script: Any, asked: list[dict[str, Any]], threshold: float) -> dict[str, Any]:
    """Do what the script's `main` does."""
    data, said = dataset(asked), {each["id"]: each["said"] for each in asked}
    no_answer = {each["id"]: each["no_answer"] for each in asked}
    has_answer = script.make_qid_to_has_ans(data)
    exact, f1 = script.get_raw_scores(data, said)
    given = [script.apply_no_ans_threshold(each, no_answer, has_answer, threshold) for each in (exact, f1)]
    scores = dict(script.make_eval_dict(*given))
    for name, wanted in (("HasAns", True), ("NoAns", False)):
        part = [each for each, has in has_answer.items() if has == wanted]
        if part:
            script.merge_eval(scores, script.make_eval_dict(*given, qid_list=part), name)
    script.find_all_best_thresh(scores, said, exact, f1, no_answer, has_answer)
    return {"questions": asked, "threshold": threshold, "scores": scores, "each": [list(exact.values()), list(f1.values())]}


def main() -> None:
    folder = Path(sys.argv[1])
    first, second = (module(folder / f"evaluate-v{version}.py") for version in ("1.1", "2.0"))
    golden = {
        "1.1": [of_version_1(first, drawn_questions(n, n, impossible=0)) for n in (1, 40, 60)],
        "2.0": [
            of_version_2(second, drawn_questions(n, n, impossible=share), threshold)
            for n, share, threshold in ((1, 1.0, 0.5), (60, 0.4, 0.5), (61, 0.5, 0.2), (41, 0.9, 1.0), (40, 0.1, 0.8))
        ],
    }
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(json.dumps(golden, separators=(",", ":")).replace('},{"id"', '},\n{"id"') + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
