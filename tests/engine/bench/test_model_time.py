"""The decode floor's arithmetic."""

import pytest

from chairlift.bench.shapes import SHAPES
from engine.bench.cpu_floors import Floors
from engine.bench.model_time import DecodeTime, library_ops_per_s, peak_ops_per_s


def qwen(ops_per_s: float, *, weight_bytes: int = 1, kv_bytes: int = 1) -> DecodeTime:
    return DecodeTime(SHAPES["0.6B"], weight_bytes, kv_bytes, read_bytes_per_s=21e9, ops_per_s=ops_per_s)


def test_the_estimates_of_the_design_come_out_again() -> None:
    # of a machine with 21 GB/s, 420 GOP/s int8 and 157 GFLOP/s fp32 at 32 rows
    assert qwen(420e9).seconds(32, 256) == pytest.approx(0.113, rel=0.02)
    assert qwen(420e9, kv_bytes=4).seconds(32, 256) == pytest.approx(0.180, rel=0.02)
    assert qwen(157e9, weight_bytes=4, kv_bytes=4).seconds(32, 256) == pytest.approx(0.332, rel=0.02)


def test_one_row_is_bound_by_reading_the_weights() -> None:
    assert qwen(420e9).seconds(1, 0) == qwen(1e15).seconds(1, 0) == pytest.approx(596e6 / 21e9, rel=0.01)


def test_rates_are_those_of_the_type() -> None:
    floors = Floors(1, read_bytes_per_s=1.0, fp32_flops=2.0, int8_ops=3.0, matrix_products={})
    assert (peak_ops_per_s(floors, "none"), peak_ops_per_s(floors, "int8")) == (2.0, 3.0)
    for quantization in ("none", "int8"):
        assert library_ops_per_s(quantization, 32, SHAPES["tiny"]) > 0
