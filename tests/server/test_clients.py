"""What users run against `txl serve`, unchanged: openai-python, and lm-evaluation-harness with `local-completions`.

Not part of the suite: `make clients` builds their environment (clients/requirements.txt) and runs this. Each is a process of
its own there; nothing of them is imported here.
"""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transformer_xl
from tests.server.conftest import BYTES, MEM_LEN
from tests.server.serving import CLIENTS, PYTHON, run, served
from tests.world_cases import txl
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.transformer_xl import TransformerXL

KEY = "a-key-of-at-least-sixteen-letters"
PIECE = 64

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is missing; `make clients` makes this environment"),
]


# openai-python


@pytest.fixture(scope="module")
def openai(tmp_path_factory: pytest.TempPathFactory, model: TransformerXL) -> dict[str, Any]:
    """What peer_openai.py saw of a server of one row, a queue of one, and room for a few sessions."""
    folder = tmp_path_factory.mktemp("openai")
    model.save_pretrained(folder / "tiny")
    BYTES.save(folder / "tiny" / "tokenizer.json")
    (folder / "keys").write_text(KEY + "\n")
    (folder / "keys").chmod(0o600)
    options = ("--rows", "1", "--queue", "1", "--session-memory", "0.0002", "--api-key-file", str(folder / "keys"), "--quiet")
    with served(*options, run=str(folder / "tiny"), key=KEY) as (_, client, said):
        address = str(client.base_url).rstrip("/")
        printed = run(folder, str(PYTHON), "-W", "error", str(CLIENTS / "peer_openai.py"), address, KEY)
        assert not any("Traceback" in line or "warning" in line.lower() for line in said), said
    answer, *more = printed.strip().splitlines()
    assert not more, "a warning"
    return json.loads(answer)


def test_openai_python_completes_and_streams(openai: dict[str, Any]) -> None:
    assert openai["models"] == {"listed": ["tiny"], "retrieved": "tiny"}
    made = openai["completions"]
    assert made["object"] == "text_completion" and made["reasons"] == ["length"] * 2 and made["logs"] == [7] * 4
    assert made["texts"] == made["again"], "the same prompt as text and as ids, and the same seed"
    read = {"prompt_tokens": 16, "prompt_tokens_details": {"cached_tokens": 0}}
    assert made["usage"] == {**read, "completion_tokens": 14, "total_tokens": 30}
    assert made["lists"] == [0, 1, 2] and made["echoed"] == ["a", "bc"] and made["ours"] == 1
    assert made["fingerprint"].endswith("-fp32-rows1-seed3")
    stream = openai["streams"]
    assert stream["parts"] == stream["whole"] and stream["reason"] == "length"
    assert stream["last"] == [[], True], "the last chunk has the usage, and no choices"


def test_a_stream_that_openai_python_leaves_frees_its_row(openai: dict[str, Any]) -> None:
    assert openai["cancels"] == {"got": 2, "free": True, "asynchronous": 3, "free again": True}


@pytest.mark.parametrize(
    ("what", "kind", "status", "code"),
    [
        ("model", "NotFoundError", 404, "model_not_found"),
        ("range", "BadRequestError", 400, "invalid_request"),
        ("field", "BadRequestError", 400, "invalid_request"),
        ("key", "AuthenticationError", 401, "invalid_api_key"),
        ("moved", "ConflictError", 409, "moved"),
        ("chat", "InternalServerError", 501, "not_supported"),
        ("late", "InternalServerError", 504, "timeout"),
        ("embeddings", "NotFoundError", 404, "not_found"),
    ],
)
def test_openai_python_raises_its_own_errors_and_asks_once(
    openai: dict[str, Any], what: str, kind: str, status: int, code: str
) -> None:
    """It repeats 409 and 5xx by itself, but where `x-should-retry` says that this is of no use."""
    error = openai["errors"][what]
    assert (error["class"], error["status"], error["code"]) == (kind, status, code)
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error") and error["n_sent"] == 1


def test_openai_python_waits_as_long_as_it_is_told(openai: dict[str, Any]) -> None:
    full, memory = openai["refused"]["full"], openai["refused"]["memory"]
    assert full["answers"][0] == 429 and full["n_sent"] == 2 and full["waited"] >= int(full["retry_after"][0]) >= 1
    assert (memory["status"], memory["code"], memory["n_sent"]) == (503, "no_room", 2)
    assert memory["waited"] >= int(memory["retry_after"][0]) >= 1
    assert openai["refused"]["afterwards"] == 1 and openai["refused"]["free"]


# lm-evaluation-harness

QUESTIONS = [
    "Once upon a time, there was",
    "Grüße an alle. " * 20 + "Und",
    "x",
    "A line\nand another one",
]  # spaces at an end would move
TEXTS = ["A text of some length, which is read to its end. " * 12, "Grüße\n", "日本語の文"]
_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
target_delimiter: ""
{more}
"""
_KINDS = {  # output type, text, target, and what else
    "choices": ("multiple_choice", "{{question}}", "{{answer}}", 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'),
    "rolling": ("loglikelihood_rolling", "", "{{text}}", "metric_list: [{metric: bits_per_byte}]"),
    "written": (
        "generate_until",
        "{{question}}",
        "{{choices[0]}}",
        'generation_kwargs: {until: ["\\n", "zz"], max_gen_toks: 20}\nmetric_list: [{metric: exact_match}]',
    ),
}


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_harness_gets_the_sums_of_txl_eval(
    tmp_path: Path, model: TransformerXL, at_once: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Log-likelihoods are those of `txl eval --per-token`, to the rounding of fp32; greedy is what is likeliest."""
    monkeypatch.chdir(tmp_path)
    docs = write_tasks(tmp_path, model)
    with served("--rows", "4", "--quiet") as (_, client, said):
        url = f"{client.base_url}/v1/completions".replace("//v1", "/v1")
        arguments = f"model=tiny,base_url={url},max_length=1000000,custom_prefix_token_id=10,num_concurrent={at_once}"
        offline = {**OFFLINE, "HF_HOME": str(tmp_path / "hf")}
        said_there = run(
            tmp_path,
            *(str(PYTHON.with_name("lm_eval")), "--model", "local-completions", "--model_args", arguments),
            *("--include_path", ".", "--tasks", ",".join(f"our_{name}" for name in docs)),
            *("--output_path", "out", "--log_samples"),
            environment=offline,
        )
        assert "Using tokenizer remote" in said_there and "Retry" not in said_there, said_there
        assert not any("Traceback" in line for line in said), said
    differences: list[float] = []

    def compare(total: float, text: str, n: int) -> None:
        expected = scored(text, n)
        differences.append(abs(total / expected - 1))
        assert total == pytest.approx(expected, rel=1e-7, abs=1e-6)

    found = {name: samples(tmp_path / "out" / "tiny", name) for name in docs}
    for doc in found["choices"]:
        for place, (total, is_greedy) in enumerate(doc["resps"]):
            prompt, answer = doc["doc"]["question"], doc["doc"]["choices"][place]
            compare(total, prompt + answer, len(answer.encode()))
            assert is_greedy == (place == 2), (doc, place)
    for doc in found["rolling"]:
        text = doc["doc"]["text"]
        compare(doc["resps"][0], "\n" + text, len(text.encode()))
    record_property(
        "figure", f"lm_eval, {at_once} at once: {len(differences)} sums, off by {max(differences):.1e} of themselves at most"
    )
    assert len(found["choices"]) == len(found["written"]) == len(QUESTIONS) and len(found["rolling"]) == len(TEXTS)


def test_the_harness_reads_an_export_through_transformers(
    tmp_path: Path, model: TransformerXL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--model hf`, as docs/scoring.md starts it: sums of a text that fits into the memory are those of `txl eval`."""
    monkeypatch.chdir(tmp_path)
    docs = write_tasks(tmp_path, model)
    del docs["written"]  # for which the harness asks the tokenizer for an end of text
    packages = Path(np.__file__).parents[1]
    said = run(
        tmp_path,
        *(str(PYTHON), "-c", "import transformer_xl.huggingface; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"),
        *("run", "--model", "hf", "--model_args", "pretrained=tiny,dtype=float32,prefix_token_id=10", "--device", "cpu"),
        *("--include_path", ".", "--tasks", ",".join(f"our_{name}" for name in docs)),
        *("--output_path", "out", "--log_samples"),
        environment={**OFFLINE, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": f"{SOURCES}{os.pathsep}{packages}"},
    )
    assert "our_choices" in said
    found = {name: samples(next(path for path in (tmp_path / "out").iterdir() if path.is_dir()), name) for name in docs}
    n_compared = 0
    for doc in found["choices"]:
        prompt = doc["doc"]["question"]
        for (total, _), answer in zip(doc["resps"], doc["doc"]["choices"], strict=True):
            if len((prompt + answer).encode()) <= MEM_LEN:
                assert total == pytest.approx(scored(prompt + answer, len(answer.encode())), rel=1e-5)
                n_compared += 1
    assert n_compared >= 9 and len(found["rolling"]) == len(TEXTS)


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
SOURCES = Path(transformer_xl.__file__).parents[1]


def write_tasks(folder: Path, model: TransformerXL) -> dict[str, list[dict[str, Any]]]:
    """Save the model as `tiny`, and our tasks with their documents, which are returned."""
    model = deepcopy(model)
    with torch.no_grad():
        bias = next(each for name, each in model.named_parameters() if each.shape == (256,))
        bias[128:] -= 12  # what is likeliest is a whole character
    model.save_pretrained(folder / "tiny")
    BYTES.save(folder / "tiny" / "tokenizer.json")
    choices = [[" a memory", "ü日", greedy(model, question)] for question in QUESTIONS]
    docs = {
        "choices": [
            {"question": question, "choices": own, "answer": i % 3}
            for i, (question, own) in enumerate(zip(QUESTIONS, choices, strict=True))
        ],
        "rolling": [{"text": text} for text in TEXTS],
    }
    docs["written"] = docs["choices"]
    for name, own in docs.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in own))
        kind, text, target, more = _KINDS[name]
        task = {"name": f"our_{name}", "file": str(folder / f"{name}.jsonl"), "kind": kind, "text": text, "target": target}
        Path(f"our_{name}.yaml").write_text(_TASK.format(**task, more=more))
    return docs


def samples(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read what the harness has noted of a task, with numbers as numbers."""

    def value(text: Any) -> Any:
        return {"True": True, "False": False}.get(text) if text in ("True", "False") else float(text)

    (file,) = folder.glob(f"samples_our_{name}_*.jsonl")
    docs = [json.loads(line) for line in file.read_text().splitlines()]
    for doc in docs if name != "written" else ():
        doc["resps"] = [[value(each) for each in own[0]] if name == "choices" else value(own[0]) for own in doc["resps"]]
    return docs


def scored(text: str, n: int) -> float:
    """Return the log-likelihood of the last `n` tokens, from `txl eval --per-token`."""
    Path("scored.txt").write_bytes(text.encode())
    reading = (
        "--batch-size",
        "1",
        "--tgt-len",
        str(PIECE),
        "--mem-len",
        str(MEM_LEN + 1),
        "--same-length",
        "--precision",
        "fp32",
    )
    done = txl("eval", "tiny", "--file", "scored.txt", "--per-token", "nats.npy", *reading, "--quiet")
    assert done["status"] == 0, done
    return -float(np.load("nats.npy").astype(np.float64)[-n:].sum())


def greedy(model: TransformerXL, prompt: str, n: int = 3) -> str:
    """Return the `n` characters that are likeliest one after another, for a decoder that reads token by token."""
    decoder = Decoder(model, batch_size=1, tgt_len=PIECE)
    written = BYTES.encode(prompt).tolist()
    scores = decoder.feed([written])
    for _ in range(n):
        written.append(int(scores.argmax()))
        scores = decoder.feed([written[-1:]])
    return BYTES.decode(written[-n:])
