"""Figures of data sheets, and such as are known better."""

import pytest

from transformer_xl.cost.hardware import gpu, with_figures
from transformer_xl.errors import ConfigError


def test_data_sheets_and_what_is_known_better() -> None:
    assert gpu("H100", "auto").precision == "bf16"
    assert gpu("v100", "auto").precision == "fp16"
    assert gpu("a100", "fp32").flops == 19.5e12
    assert not gpu("v100", "auto").fuses
    changed = with_figures(gpu("h100", "auto"), flops=500, memory=96, network=400, efficiency=0.4)
    assert (changed.flops, changed.memory, changed.network, changed.efficiency) == (500e12, 96e9, 400e9, 0.4)
    assert changed.origin == "data sheet; flops, memory as given"
    assert changed.bandwidth == gpu("h100", "auto").bandwidth
    with pytest.raises(ConfigError, match=r"unknown GPU 'h1000'; did you mean 'h100'\?; or give --flops"):
        gpu("h1000", "auto")
    for figure in ("flops", "efficiency"):
        with pytest.raises(ConfigError, match=rf"--{figure} \(-1\) must be above 0"):
            with_figures(gpu("h100", "auto"), **{figure: -1.0})
    with pytest.raises(ConfigError, match=r"--efficiency \(30\) must be at most 1"):
        with_figures(gpu("h100", "auto"), efficiency=30.0)
