"""CPU features follow the compiler's settings; tests/portability compiles the kernels for older CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from llvmlite import ir

from kernels.cpu import cpu_features as module
from kernels.cpu.cpu_features import ByteProducts, CpuFeatures, cpu_features, features_of_arm
from kernels.cpu.intrinsics import emit_cycles
from tests.hang import HANG_S

ROOT = Path(__file__).parents[3]

AVX512 = "+avx512f,+avx512bw,+avx512vl"
FEATURES = {
    # as numba has it for NUMBA_CPU_NAME=generic
    "": CpuFeatures(avx512=False, byte_products=ByteProducts.GENERIC, fp16=False, bf16=False),
    "+avx2,+fma,+f16c": CpuFeatures(avx512=False, byte_products=ByteProducts.AVX2, fp16=True, bf16=False),
    "+avx2,+fma": CpuFeatures(avx512=False, byte_products=ByteProducts.AVX2, fp16=False, bf16=False),
    "+avx2,+avxvnni": CpuFeatures(avx512=False, byte_products=ByteProducts.AVX_VNNI, fp16=False, bf16=False),
    "+avx512f,+avx512bw": CpuFeatures(avx512=False, byte_products=ByteProducts.GENERIC, fp16=False, bf16=False),
    f"{AVX512}": CpuFeatures(avx512=True, byte_products=ByteProducts.AVX512, fp16=True, bf16=False),
    f"{AVX512},-avx512vnni": CpuFeatures(avx512=True, byte_products=ByteProducts.AVX512, fp16=True, bf16=False),
    f"{AVX512},+avx512vnni": CpuFeatures(avx512=True, byte_products=ByteProducts.AVX512_VNNI, fp16=True, bf16=False),
    f"{AVX512},+avx512vnni,+avxvnni": CpuFeatures(
        avx512=True, byte_products=ByteProducts.AVX512_VNNI, fp16=True, bf16=False
    ),
    "-avx512f,+avx512bw,+avx512vl,+avx512vnni,+avx2": CpuFeatures(
        avx512=False, byte_products=ByteProducts.AVX2, fp16=False, bf16=False
    ),
    f"{AVX512},+avx512bf16": CpuFeatures(avx512=True, byte_products=ByteProducts.AVX512, fp16=True, bf16=True),
    f"{AVX512},-avx512bf16": CpuFeatures(avx512=True, byte_products=ByteProducts.AVX512, fp16=True, bf16=False),
    "+avx2,+avx512bf16": CpuFeatures(avx512=False, byte_products=ByteProducts.AVX2, fp16=False, bf16=False),
}
ARM_FEATURES = {
    "+neon": ByteProducts.GENERIC,  # ARMv8.0, such as Cortex-A72
    "+neon,+dotprod": ByteProducts.DOTPROD,  # ARMv8.2, such as Neoverse N1
    "+neon,+dotprod,+i8mm": ByteProducts.I8MM,  # ARMv8.6, such as Neoverse V1
}


@pytest.mark.parametrize("names", FEATURES)
def test_features_follow_the_compilers_settings(names, monkeypatch):
    monkeypatch.setattr(module, "_IS_ARM", False)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", names)
    assert cpu_features.__wrapped__() == FEATURES[names]


@pytest.mark.parametrize("names", ARM_FEATURES)
def test_every_arm_cpu_converts_fp16(names, monkeypatch):
    monkeypatch.setattr(module, "_IS_ARM", True)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", names)
    assert cpu_features.__wrapped__() == CpuFeatures(
        avx512=False, byte_products=ARM_FEATURES[names], fp16=True, bf16=False
    )


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ("fp asimd evtstrm crc32 cpuid", ""),  # of Cortex-A72
        ("fp asimd evtstrm aes atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs", ",+dotprod"),
        ("fp asimd asimdhp asimddp sha512 sve svei8mm i8mm svebf16 bf16", ",+dotprod,+i8mm"),
    ],
)
def test_products_of_bytes_of_an_arm_cpu_are_those_that_linux_names(flags, added):
    cpuinfo = f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {flags}\nCPU part\t: 0xd0c\n\nprocessor\t: 1\n"
    assert features_of_arm("+neon,+crc", cpuinfo) == f"+neon,+crc{added}"


@pytest.mark.parametrize(("i8mm", "added"), [(0, "+dotprod"), (1, "+dotprod,+i8mm")])  # Apple's M1 and M2
def test_products_of_bytes_of_an_arm_cpu_are_those_that_macos_names(i8mm, added):
    answer = f"hw.optional.arm.FEAT_SHA512: 1\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: {i8mm}\n"
    assert features_of_arm("", answer) == added
    assert features_of_arm("+neon", answer) == f"+neon,{added}"


def test_an_arm_cpu_that_no_system_describes_has_what_llvm_finds():
    assert features_of_arm("+neon", "") == "+neon"


IMPORTS = """
import platform
platform.machine = lambda: "aarch64"
import kernels.cpu.recording
import numba
from numba.core.registry import cpu_target
features = cpu_target.target_context.codegen()._tm_features
print(features is numba.config.CPU_FEATURES)
"""


def test_numba_compiles_for_the_features_of_an_arm_cpu_that_it_does_not_look_for():
    """Whatever is imported first: its first decorator fixes them."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout == "True\n", done.stderr


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
