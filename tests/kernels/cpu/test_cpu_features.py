"""CPU features follow the compiler's settings; tests/portability compiles the kernels for older CPUs."""

from pathlib import Path

import numba
import pytest

from kernels.cpu.cpu_features import CpuFeatures, cpu_features

FEATURES = {
    "": CpuFeatures(avx512=False, vnni=False, f16c=False, bf16=False),  # as numba has it for NUMBA_CPU_NAME=generic
    "+avx2,+fma,+f16c": CpuFeatures(avx512=False, vnni=False, f16c=True, bf16=False),
    "+avx2,+fma": CpuFeatures(avx512=False, vnni=False, f16c=False, bf16=False),
    "+avx512f,+avx512bw": CpuFeatures(avx512=False, vnni=False, f16c=False, bf16=False),
    "+avx512f,+avx512bw,+avx512vl": CpuFeatures(avx512=True, vnni=False, f16c=True, bf16=False),
    "+avx512f,+avx512bw,+avx512vl,-avx512vnni": CpuFeatures(avx512=True, vnni=False, f16c=True, bf16=False),
    "+avx512f,+avx512bw,+avx512vl,+avx512vnni": CpuFeatures(avx512=True, vnni=True, f16c=True, bf16=False),
    "-avx512f,+avx512bw,+avx512vl,+avx512vnni": CpuFeatures(avx512=False, vnni=False, f16c=False, bf16=False),
    "+avx512f,+avx512bw,+avx512vl,+avx512bf16": CpuFeatures(avx512=True, vnni=False, f16c=True, bf16=True),
    "+avx512f,+avx512bw,+avx512vl,-avx512bf16": CpuFeatures(avx512=True, vnni=False, f16c=True, bf16=False),
    "+avx2,+avx512bf16": CpuFeatures(avx512=False, vnni=False, f16c=False, bf16=False),
}


@pytest.mark.parametrize("names", FEATURES)
def test_features_follow_the_compilers_settings(names, monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_FEATURES", names)
    assert cpu_features.__wrapped__() == FEATURES[names]


def test_features_are_those_of_this_cpu_by_default(monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)
    flags = Path("/proc/cpuinfo").read_text().split()
    assert cpu_features.__wrapped__().avx512 == ({"avx512f", "avx512bw", "avx512vl"} <= {*flags})
