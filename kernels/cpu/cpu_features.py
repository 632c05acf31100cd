"""CPU features that the compiler may use; detected once per process."""

import platform
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
from numba.core import codegen

_config: Any = numba.config  # its attributes are made at run time
_host_features: Any = codegen.get_host_cpu_features


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Instruction sets that decide which kernels are available and fast.

    Attributes:
        avx512: 512-bit vectors and 32 registers for them.
        vnni: products of unsigned and signed bytes, summed in 32 bits, on 512-bit vectors.
        fp16: conversion of fp16 to fp32: F16C, which 512-bit vectors include; every ARM CPU of 64 bits has it.
        bf16: products of pairs of bf16, summed in fp32, on 512-bit vectors.
    """

    avx512: bool
    vnni: bool
    fp16: bool
    bf16: bool


@cache
def cpu_features() -> CpuFeatures:
    """Returns the features of this CPU, or those in NUMBA_CPU_FEATURES.

    An empty string counts as set: NUMBA_CPU_NAME=generic alone means the x86-64 baseline.
    """
    named: str | None = _config.CPU_FEATURES
    names: str = _host_features() if named is None else named  # such as +avx2,-avx512f
    features = {name[1:] for name in names.split(",") if name.startswith("+")}
    avx512 = {"avx512f", "avx512bw", "avx512vl"} <= features
    return CpuFeatures(
        avx512=avx512,
        vnni=avx512 and "avx512vnni" in features,
        fp16=avx512 or "f16c" in features or platform.machine() in ("aarch64", "arm64"),
        bf16=avx512 and "avx512bf16" in features,
    )
