"""CPU features follow the compiler's settings; tests/portability compiles the kernels for older CPUs."""

import platform
from pathlib import Path

import numba
import pytest
from llvmlite import ir

from kernels.cpu.cpu_features import CpuFeatures, cpu_features
from kernels.cpu.intrinsics import emit_cycles

FEATURES = {
    "": CpuFeatures(avx512=False, vnni=False, fp16=False, bf16=False),  # as numba has it for NUMBA_CPU_NAME=generic
    "+avx2,+fma,+f16c": CpuFeatures(avx512=False, vnni=False, fp16=True, bf16=False),
    "+avx2,+fma": CpuFeatures(avx512=False, vnni=False, fp16=False, bf16=False),
    "+avx512f,+avx512bw": CpuFeatures(avx512=False, vnni=False, fp16=False, bf16=False),
    "+avx512f,+avx512bw,+avx512vl": CpuFeatures(avx512=True, vnni=False, fp16=True, bf16=False),
    "+avx512f,+avx512bw,+avx512vl,-avx512vnni": CpuFeatures(avx512=True, vnni=False, fp16=True, bf16=False),
    "+avx512f,+avx512bw,+avx512vl,+avx512vnni": CpuFeatures(avx512=True, vnni=True, fp16=True, bf16=False),
    "-avx512f,+avx512bw,+avx512vl,+avx512vnni": CpuFeatures(avx512=False, vnni=False, fp16=False, bf16=False),
    "+avx512f,+avx512bw,+avx512vl,+avx512bf16": CpuFeatures(avx512=True, vnni=False, fp16=True, bf16=True),
    "+avx512f,+avx512bw,+avx512vl,-avx512bf16": CpuFeatures(avx512=True, vnni=False, fp16=True, bf16=False),
    "+avx2,+avx512bf16": CpuFeatures(avx512=False, vnni=False, fp16=False, bf16=False),
}


@pytest.mark.parametrize("names", FEATURES)
def test_features_follow_the_compilers_settings(names, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", names)
    assert cpu_features.__wrapped__() == FEATURES[names]


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_every_arm_cpu_converts_fp16(machine, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+neon")
    assert cpu_features.__wrapped__() == CpuFeatures(avx512=False, vnni=False, fp16=True, bf16=False)


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-darwin23.0.0"])
def test_the_time_stamp_of_an_arm_cpu_is_a_counter_that_processes_may_read(triple):
    """Of cycles, which older LLVMs take, Linux lets processes read nothing: SIGILL at the first step."""
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.IntType(64), []), "stamp")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(emit_cycles(builder))
    text = str(module)
    assert "mrs $0, cntvct_el0" in text
    assert "readcyclecounter" not in text


def test_features_are_those_of_this_cpu_by_default(monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)
    flags = Path("/proc/cpuinfo").read_text().split()
    assert cpu_features.__wrapped__().avx512 == ({"avx512f", "avx512bw", "avx512vl"} <= {*flags})
