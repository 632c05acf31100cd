"""CPUs older than this one, as far as the compiler can pretend."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from kernels.cpu.cpu_features import CpuFeatures, cpu_features

FEATURES = {
    "": CpuFeatures(avx512=False, vnni=False),  # as numba has it for NUMBA_CPU_NAME=generic
    "+avx2,+fma": CpuFeatures(avx512=False, vnni=False),
    "+avx512f,+avx512bw": CpuFeatures(avx512=False, vnni=False),
    "+avx512f,+avx512bw,+avx512vl": CpuFeatures(avx512=True, vnni=False),
    "+avx512f,+avx512bw,+avx512vl,-avx512vnni": CpuFeatures(avx512=True, vnni=False),
    "+avx512f,+avx512bw,+avx512vl,+avx512vnni": CpuFeatures(avx512=True, vnni=True),
    "-avx512f,+avx512bw,+avx512vl,+avx512vnni": CpuFeatures(avx512=False, vnni=False),
}


@pytest.mark.parametrize("names", FEATURES)
def test_features_are_those_the_compiler_is_told(names, monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_FEATURES", names)
    assert cpu_features.__wrapped__() == FEATURES[names]


def test_features_are_those_of_this_cpu_unless_told(monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)
    flags = Path("/proc/cpuinfo").read_text().split()
    assert cpu_features.__wrapped__().avx512 == ({"avx512f", "avx512bw", "avx512vl"} <= {*flags})


CODE = """
import torch
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.linear import Kind
from kernels.cpu.multiply_tile import MAX_ROWS
from kernels.ops import cpu_ops, reference_ops
from kernels.testing import assert_close, assert_same_bits, fill_cache, make_ragged_batch

assert not cpu_features().avx512 and MAX_ROWS == 2
ops, int8 = cpu_ops(), cpu_ops(quantization="int8", num_threads=2)
x, weight, bias = torch.randn(33, 70), torch.randn(99, 70) / 8, torch.randn(99)
assert_close(ops.linear(x, ops.pack_linear(weight, bias)), x @ weight.T + bias)
layer = int8.pack_linear(weight, bias)
assert layer.kind is Kind.INT8_WEIGHTS
scales = weight.abs().amax(1, keepdim=True) / 127
together = int8.linear(x, layer)
assert_close(together, x @ ((weight / scales).round() * scales).T + bias)
assert_same_bits(torch.cat([int8.linear(row, layer) for row in x.split(1)]), together)
for dtype in (torch.float32, torch.int8):
    batch = make_ragged_batch([1, 7, 40], [50, 65, 40], num_heads=6)
    out = ops.paged_attention(batch.q, fill_cache(ops, batch, dtype), batch.metadata, scale=0.1)
    expected = reference_ops().paged_attention(
        batch.q, fill_cache(reference_ops(), batch), batch.metadata, scale=0.1
    )
    if dtype is torch.float32:
        assert_close(out, expected)
    assert (out - expected).abs().max() < 0.05
    solo = batch.row(1)
    assert_same_bits(ops.paged_attention(solo.q, fill_cache(ops, solo, dtype), solo.metadata, scale=0.1), out[1:8])
print("done")
"""


@pytest.mark.slow
def test_all_kernels_work_without_avx512():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    environment |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma"}
    command = [sys.executable, "-W", "error", "-c", CODE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert result.stdout == "done\n", result.stderr
