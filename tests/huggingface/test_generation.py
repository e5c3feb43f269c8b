"""transformers' `generate` and pipeline: our tokens, one token read per token written, rows that do not disturb each other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.huggingface.conftest import TEXT, Saved, shapes_read
from transformer_xl.generation.generate import generate
from transformer_xl.generation.sampling import Sampling

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import AutoTokenizer, pipeline  # noqa: E402

from transformer_xl.huggingface import MemoryCache  # noqa: E402

PROMPT = "hello, wörld"


@pytest.fixture
def hf(saved: Saved) -> Any:
    return saved.in_transformers()


def ids_of(saved: Saved, *texts: str) -> torch.Tensor:
    return torch.tensor([saved.tokenizer.encode(text).tolist() for text in texts])


def greedy(saved: Saved, ids: torch.Tensor, n: int) -> list[int]:
    return list(generate(saved.model, ids, Sampling(temperature=0), max_new_tokens=n))


@pytest.mark.parametrize(
    "changes",
    [{"mem_len": 40}, {"mem_len": 40, "zero_first_memory": True, "same_length": True}, {"mem_len": 16, "cutoffs": (5, 9)}],
)
def test_greedy_text_is_ours(save: Callable[..., Saved], changes: dict[str, object]) -> None:
    saved = save(**changes)
    hf = saved.in_transformers()
    ids = ids_of(saved, PROMPT)
    written = hf.generate(ids, max_new_tokens=20, do_sample=False)
    assert written[0, : ids.shape[1]].equal(ids[0])
    assert written[0, ids.shape[1] :].tolist() == greedy(saved, ids[0], 20)
    assert len(set(greedy(saved, ids[0], 20))) > 1, "a constant text would prove nothing"


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3, "do_sample": False}])
def test_only_new_tokens_are_read(saved: Saved, hf: Any, options: dict[str, object]) -> None:
    rows = options.get("num_beams", 1)
    with shapes_read(hf.transformer) as shapes:
        hf.generate(ids_of(saved, PROMPT), max_new_tokens=9, **options)
    assert shapes == [(rows, len(PROMPT))] + [(rows, 1)] * 8


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"attention": "al_rfou", "max_klen": 60, "n_head": 2, "d_head": 5}, {}),
        ({"mem_len": 0}, {}),
        ({"mem_len": 40}, {"use_cache": False}),
    ],
)
def test_where_tokens_cannot_be_read_one_by_one_all_are_read_again(
    save: Callable[..., Saved], changes: dict[str, object], options: dict[str, object]
) -> None:
    """Positions that count from a segment's end, or nothing that would remember the text."""
    saved = save(**changes)
    hf = saved.in_transformers()
    with shapes_read(hf.transformer) as shapes:
        written = hf.generate(ids_of(saved, PROMPT), max_new_tokens=4, do_sample=False, **options)
    assert shapes == [(1, len(PROMPT) + n) for n in range(4)]
    assert written[0, len(PROMPT) :].tolist() == greedy(saved, ids_of(saved, PROMPT)[0], 4)


def test_a_long_prompt_is_read_in_pieces_as_ours_is(saved: Saved, hf: Any) -> None:
    ids = ids_of(saved, (TEXT * 6)[:270])
    with shapes_read(hf.transformer) as shapes:
        written = hf.generate(ids, max_new_tokens=5, do_sample=False)
    assert shapes == [(1, 128), (1, 128), (1, 14), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert written[0, 270:].tolist() == greedy(saved, ids[0], 5)


def test_padded_prompts_are_continued_as_if_alone(saved: Saved, hf: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved.path)
    texts = [PROMPT, "text", (TEXT * 4)[:140]]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    written = hf.generate(**batch, max_new_tokens=12, do_sample=False)
    for row, text in zip(written, texts, strict=True):
        expected = hf.generate(tokenizer(text, return_tensors="pt")["input_ids"], max_new_tokens=12, do_sample=False)
        assert row[-12:].equal(expected[0, -12:]), text


def best_by_search(saved: Saved, ids: torch.Tensor, *, beams: int, n: int) -> list[int]:
    """Beam search, reading the whole text again at every step; memory must be long enough for it."""
    texts = [(0.0, ids[0].tolist())]
    for _ in range(n):
        found = []
        for score, text in texts:
            logits = saved.model(torch.tensor([text])).logits
            assert logits is not None
            values, tokens = logits[0, -1].log_softmax(-1).topk(beams)
            found += [(score + float(v), [*text, int(t)]) for v, t in zip(values.detach(), tokens, strict=True)]
        texts = sorted(found, reverse=True)[:beams]
    return texts[0][1]


def test_beam_search_reorders_the_memory(save: Callable[..., Saved]) -> None:
    saved = save(mem_len=40)
    hf = saved.in_transformers()
    ids = ids_of(saved, PROMPT, "this is a te")
    written = hf.generate(ids, max_new_tokens=8, num_beams=4, do_sample=False)
    for row, own in zip(written, ids, strict=True):
        assert row.tolist() == best_by_search(saved, own[None], beams=4, n=8)
    assert written[0, -8:].tolist() != greedy(saved, ids[0], 8), "the search must find something that greed does not"


def test_half_precision_writes(saved: Saved) -> None:
    hf = saved.in_transformers(dtype="bfloat16")
    ids = ids_of(saved, PROMPT, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    written = hf.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert written[0, 12:].tolist() == list(generate(hf.transformer, ids[0], Sampling(temperature=0), max_new_tokens=6))
    assert hf(ids, attention_mask=mask, labels=ids).loss.dtype == torch.float32


def test_samples_are_repeatable_and_differ(saved: Saved, hf: Any) -> None:
    ids = ids_of(saved, PROMPT)
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append(hf.generate(ids, max_new_tokens=15, do_sample=True, top_k=5, num_return_sequences=3))
    assert texts[0].equal(texts[1]) and len(texts[0].unique(dim=0)) == 3


def test_generation_goes_on_from_a_memory(saved: Saved, hf: Any) -> None:
    ids = ids_of(saved, PROMPT)
    whole = hf.generate(ids, max_new_tokens=12, do_sample=False)
    first = hf.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert isinstance(first.cache, MemoryCache)
    mems = first.cache.mems  # has read everything but the last token
    with shapes_read(hf.transformer) as shapes:
        second = hf.generate(first.sequences[:, -1:], mems=mems, max_new_tokens=6, do_sample=False)
        third = hf.generate(first.sequences, cache=first.cache, max_new_tokens=6, do_sample=False)
    assert shapes == [(1, 1)] * 12
    assert second[0, 1:].equal(whole[0, -6:]) and third.equal(whole)
    beams = hf.generate(first.sequences[:, -1:], mems=mems, max_new_tokens=6, num_beams=2, do_sample=False)
    assert beams.shape == (1, 7)


def test_rows_that_ended_are_padded_and_do_not_disturb(saved: Saved, hf: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved.path)
    ids = ids_of(saved, PROMPT, "this is a te")
    free = hf.generate(ids, max_new_tokens=10, do_sample=False)[:, 12:]
    end = next(int(t) for t in free[0] if t not in free[1])
    at = free[0].tolist().index(end)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    written = hf.generate(ids, **options)[:, 12:]
    assert written[1].equal(free[1])
    assert written[0].tolist() == free[0, : at + 1].tolist() + [tokenizer.pad_token_id] * (9 - at)


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.tensor([[1, 1, 1], [1, 1, 0]]), "prompt 1 is empty or padded at the right; use tokenizer.padding_side = 'left'"),
        (torch.tensor([[0, 0, 0], [1, 1, 1]]), "prompt 0 is empty or padded"),
    ],
)
def test_prompts_that_cannot_be_continued(hf: Any, mask: torch.Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hf.generate(torch.ones(2, 3, dtype=torch.int64), attention_mask=mask, max_new_tokens=2)


def test_the_pipeline_writes_our_text(save: Callable[..., Saved]) -> None:
    saved = save(mem_len=40)  # of a prompt that does not fit into memory, pieces see more in transformers than tokens do here
    write = pipeline("text-generation", model=str(saved.path))
    texts = [PROMPT, "this is a te"]
    results = write(texts, max_new_tokens=15, do_sample=False, batch_size=2)
    for text, (result,) in zip(texts, results, strict=True):
        expected = greedy(saved, ids_of(saved, text)[0], 15)
        assert result["generated_text"] == text + saved.tokenizer.decode(expected)
