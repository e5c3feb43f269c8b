"""The probes compute with the bytes and operations that really took the time."""

import itertools
import mmap
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cost.clock import Clock
from transformer_xl.cost.machine import MemoryWatch, describe, matmul_rate, memory_bandwidth

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def test_bandwidth_is_bytes_of_the_fastest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, takes, read = Clock(), iter([3.0, 0.5, 2.0, 0.25, 9.0]), []
    summed = torch.Tensor.sum

    def slow_sum(x: torch.Tensor) -> torch.Tensor:
        clock.pass_(next(takes))
        read.append(x)
        return summed(x)

    monkeypatch.setattr(torch.Tensor, "sum", slow_sum)
    assert memory_bandwidth(CPU, n_bytes=4096, clock=clock) == 4096 / 0.25
    assert next(takes, None) is None
    assert all(x.numel() * 4 == 4096 and (x == 1).all() for x in read)


def test_bandwidth_reads_more_than_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def no_ones(n: int, device: torch.device) -> torch.Tensor:
        sizes.append(n * 4)
        return torch.zeros(1)

    monkeypatch.setattr(torch, "ones", no_ones)
    memory_bandwidth(CPU)
    assert sizes == [512 * 2**20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_rate_grows_matrices_until_they_take_a_while(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    clock, shapes = Clock(), []
    takes = {512: 0.001, 1024: 0.002, 2048: 0.02, 4096: 0.001}

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.shape == b.shape
        assert a.dtype == b.dtype == dtype
        shapes.append(len(a))
        clock.pass_(takes[len(a)])
        return a

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert matmul_rate(CPU, dtype, clock=clock) == pytest.approx(max(2 * 1024**3 / 0.002, 2 * 2048**3 / 0.02))
    assert [size for size, _ in itertools.groupby(shapes)] == [512, 1024, 2048]


def test_machine_is_described() -> None:
    facts = describe(CPU)
    assert set(facts) == {"processor", "cores", "threads", "load", "torch"}
    assert platform.machine() in str(facts["processor"])
    assert (facts["threads"], facts["torch"]) == (torch.get_num_threads(), torch.__version__)
    assert float(facts["cores"]) >= 1
    assert float(facts["load"]) >= 0


def held_and_freed() -> None:
    size = 64 * 2**20
    before = torch.ones(size // 4)
    with MemoryWatch(CPU) as watch:
        held = torch.ones(size // 4)
        freed = torch.ones(2 * size // 4)
        del freed
        resident, peak = watch.resident, watch.peak
    assert resident is not None
    assert peak is not None
    assert resident == pytest.approx(held.nbytes, rel=0.1)
    assert peak == pytest.approx(3 * size, rel=0.1)
    with MemoryWatch(CPU) as watch:  # the peak of what was before is forgotten
        assert watch.peak is not None
        assert watch.peak < size
    assert len(before) == len(held)


def freed_before() -> None:
    def many() -> list[torch.Tensor]:
        return [torch.ones(1 << 14) for _ in range(512)]  # 64 KiB each: small enough for the C library to keep when freed

    freed = many()
    last = torch.ones(1 << 14)  # lies behind them
    del freed
    with MemoryWatch(CPU) as watch:
        held = many()
        after_taking = watch.resident
        freed = many()
        more = torch.ones(1 << 14)
        del freed
        after_freeing = watch.resident
    for resident in after_taking, after_freeing:
        assert resident == pytest.approx(sum(x.nbytes for x in held), rel=0.1)
    assert more.sum() == 1 << 14
    assert last.sum() == 1 << 14


def file_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(64 * 2**20)
    with MemoryWatch(CPU) as watch, path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert not any(pages[i] for i in range(0, len(pages), mmap.PAGESIZE))
        resident, peak = watch.resident, watch.peak
    assert resident is not None
    assert peak is not None
    assert resident < 8 * 2**20
    assert peak > 48 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
@pytest.mark.parametrize("call", ["held_and_freed()", "freed_before()", "file_read(Path(sys.argv[1]))"])
def test_memory_that_is_held_and_that_was(tmp_path: Path, call: str) -> None:
    """In a process of its own: what other tests left in the heap would be taken again, and seem to cost nothing."""
    program = f"import sys; from pathlib import Path; from tests.cost.test_machine import *; {call}"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "file"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
