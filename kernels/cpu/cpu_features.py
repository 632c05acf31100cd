"""CPU features that the compiler may use; detected once per process."""

import platform
import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import codegen

_config: Any = numba.config  # its attributes are made at run time
_llvm_features: Any = codegen.get_host_cpu_features
_IS_ARM = platform.machine() in ("aarch64", "arm64")
_CPUINFO = Path("/proc/cpuinfo")
# Names of features: Linux's or macOS's, and LLVM's.
_ARM_FLAGS = {"asimddp": "dotprod", "i8mm": "i8mm", "FEAT_DotProd": "dotprod", "FEAT_I8MM": "i8mm"}


class ByteProducts(Enum):
    """Instructions that multiply bytes and sum in 32 bits, by LLVM's names of what they need, the fastest first."""

    AVX512_VNNI = "avx512vnni"
    AVX512 = "avx512bw"
    AVX_VNNI = "avxvnni"
    AVX2 = "avx2"
    I8MM = "i8mm"
    DOTPROD = "dotprod"
    GENERIC = ""


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Instruction sets that decide which kernels are available and fast.

    Attributes:
        avx512: 512-bit vectors and 32 registers for them.
        byte_products: how products of unsigned and signed bytes are summed in 32 bits.
        fp16: conversion of fp16 to fp32: F16C, which 512-bit vectors include; every ARM CPU of 64 bits has it.
        bf16: products of pairs of bf16, summed in fp32, on 512-bit vectors.
    """

    avx512: bool
    byte_products: ByteProducts
    fp16: bool
    bf16: bool


def host_features() -> str:
    """Returns LLVM's names of this CPU's features, with signs.

    On ARM LLVM looks for few of them; those with products of bytes are added.
    """
    features: str = _llvm_features()
    return features_of_arm(features, _arm_description()) if _IS_ARM else features


def target_features() -> str:
    """Returns the features that this process compiles for: those in NUMBA_CPU_FEATURES, or this CPU's.

    An empty string counts as set: NUMBA_CPU_NAME=generic alone means the x86-64 baseline.
    """
    named: str | None = _config.CPU_FEATURES
    return host_features() if named is None else named


def features_of_arm(features: str, description: str) -> str:
    """Adds the features in an ARM CPU's description by Linux (/proc/cpuinfo) or macOS (`sysctl hw.optional.arm`)."""
    flags = set(next((line.split() for line in description.splitlines() if line.startswith("Features")), []))
    flags |= set(re.findall(r"^hw\.optional\.arm\.(\w+): 1$", description, re.MULTILINE))
    return ",".join([*filter(None, [features]), *(f"+{name}" for flag, name in _ARM_FLAGS.items() if flag in flags)])


def _arm_description() -> str:
    """Returns what the system says of an ARM CPU; empty if it says nothing."""
    if _CPUINFO.exists():
        return _CPUINFO.read_text()
    try:
        return subprocess.run(["/usr/sbin/sysctl", "hw.optional.arm"], capture_output=True, text=True).stdout
    except OSError:  # neither Linux nor macOS
        return ""


if _IS_ARM and _config.CPU_FEATURES is None:
    _config.CPU_FEATURES = host_features()


@cache
def cpu_features() -> CpuFeatures:
    """Returns the features that this process compiles for."""
    features = {name[1:] for name in target_features().split(",") if name.startswith("+")}
    avx512 = {"avx512f", "avx512bw", "avx512vl"} <= features
    return CpuFeatures(
        avx512=avx512,
        byte_products=_byte_products(features, avx512=avx512),
        fp16=avx512 or "f16c" in features or _IS_ARM,
        bf16=avx512 and "avx512bf16" in features,
    )


def _byte_products(features: Collection[str], *, avx512: bool) -> ByteProducts:
    needs_avx512 = (ByteProducts.AVX512_VNNI, ByteProducts.AVX512)
    usable = (instruction for instruction in ByteProducts if avx512 or instruction not in needs_avx512)
    return next(instruction for instruction in usable if instruction.value in {*features, ""})
