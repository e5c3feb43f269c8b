"""The memory in the place of a cache counts what was read, and unreads nothing."""

import pytest
import torch

from tests.huggingface.conftest import Saved

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


def test_a_memory_cannot_be_rolled_back(saved: Saved) -> None:
    hf = saved.in_transformers()
    ids = torch.tensor([saved.tokenizer.encode("hello, wörld").tolist()])
    cache = hf.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True).cache
    assert (cache.get_seq_length(), cache.get_max_length(), cache.batch_size, len(cache)) == (14, -1, 1, 2)
    cache.crop(0)
    with pytest.raises(ValueError, match="cannot unread tokens"):
        cache.crop(2)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        hf.generate(ids, max_new_tokens=3, prompt_lookup_num_tokens=2)
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 3
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.is_initialized) == (0, -1, False)
