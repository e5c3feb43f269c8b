"""Bytes that processes send, counted by hand."""

from transformer_xl.cost.traffic import Traffic, count_traffic


def test_rings() -> None:
    assert count_traffic(1000, n_process=1, division="ddp", n_pass=3) == Traffic(0, 0)
    assert count_traffic(1000, n_process=4, division="ddp", n_pass=3) == Traffic(reduced=2 * 0.75 * 4000)
    assert count_traffic(1000, n_process=4, division="fsdp", n_pass=3) == Traffic(3 * 0.75 * 4000, 2 * 3 * 0.75 * 4000)
