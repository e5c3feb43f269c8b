"""A lack of memory is told from other errors, and messages are one line."""

import re
from pathlib import Path

import pytest
import torch

from transformer_xl.errors import ConfigError, beside, did_you_mean, lacks_memory, nearest, no_memory, one_line


@pytest.mark.parametrize("n", [10**14, 10**18, 10**19, 10**30])
def test_what_cannot_be_allocated(n: int) -> None:
    with pytest.raises((RuntimeError, TypeError, OverflowError)) as caught:
        torch.zeros(n, 16, 4)
    assert lacks_memory(caught.value)


FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 1 has a total capacity of 14.57 GiB of which 1.58 GiB is free. "
    "Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this process has 966.00 MiB memory in use. Of "
    "the allocated memory 734.07 MiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    "error",
    [FULL, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), MemoryError()],
)
def test_a_lack_of_memory_is_told_in_torchs_words(error: Exception) -> None:
    assert lacks_memory(error)
    words = str(error).partition(". Process")[0]
    assert no_memory(error) == f"not enough memory{words and f' ({words})'}"


@pytest.mark.gpu
def test_a_real_gpu_says_so_in_these_words() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(10**13, device="cuda:0")
    assert re.search(r"GPU 0 has a total capacity of [\d.]+ \w+ of which [\d.]+ \w+ is free", no_memory(caught.value))


@pytest.mark.parametrize(
    "error", [RuntimeError("an illegal memory access"), TypeError("of a wrong type"), ValueError("overflow")]
)
def test_other_errors_are_no_lack_of_memory(error: Exception) -> None:
    assert not lacks_memory(error)


def test_a_message_is_one_line_of_bounded_length() -> None:
    assert one_line(ConfigError("a\n  b")) == "a b"
    text = one_line(ConfigError(f"'{'n' * 5000}' is wrong; choose another"))
    assert len(text) < 700
    assert text.startswith("'nnn")
    assert text.endswith("nnn' is wrong; choose another")


def test_names_that_are_far_and_the_path_itself_are_not_proposed(tmp_path: Path) -> None:
    for name in ("o.txt", "text.txt", "text.old", "latest.txt"):
        (tmp_path / name).touch()

    def hint(name: str) -> str:
        return beside(tmp_path / name, Path.exists, lists=False)

    assert hint("nothing.txt") == hint("x.txt") == hint("text.txt") == ""
    assert hint("tent.txt") == hint("text") == f"; did you mean '{tmp_path}/text.txt'?"
    assert nearest("unit", ["quiet", "per"]) is None
    assert [nearest(name, ["temperature", "same-length", "mem-len"]) for name in ("temp", "mem-length")] == [
        "temperature",
        "mem-len",
    ]
    assert did_you_mean("far", map(str, range(14))) == "known: 0, 1, 10, 11, 12, 13, 2, 3, 4, 5, 6, 7 and 2 more"
