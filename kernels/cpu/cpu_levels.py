"""Levels of x86-64 for which an image carries compiled kernels, and which of them a start uses.

numba compiles for one processor in a process, and finds kernels by its name and features. So a start chooses once,
before anything is compiled: this exact CPU, if `compile_ahead native` has compiled all kernels for it; otherwise the
highest level that the CPU has and the image carries; otherwise this exact CPU again. Whatever is missing is compiled
for the choice, so that code for two processors never mixes.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding  # type: ignore[import-untyped]

from kernels.cpu.cpu_features import target_features
from kernels.cpu.kernel_cache import COMPILED, MARKER, cache_folder, environment_digest

_V3 = (
    *("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf"),
    *("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
)
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

_config: Any = numba.config  # its attributes are made at run time


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """A processor to compile for.

    Attributes:
        cpu: LLVM's name.
        features: LLVM's names of what a CPU needs, each with a sign.
    """

    cpu: str
    features: str

    @classmethod
    def of(cls, cpu: str, features: Collection[str]) -> "CpuLevel":
        """Returns the level of these features; LLVM would use half of a 512-bit vector for x86-64-v4."""
        return cls(cpu, ",".join([*(f"+{name}" for name in features), "-prefer-256-bit"]))

    def runs_with(self, features: str) -> bool:
        """Whether a CPU with these features (LLVM's names) has all that the level needs."""
        return {name for name in self.features.split(",") if name[0] == "+"} <= set(features.split(","))

    def variables(self) -> dict[str, str]:
        """Returns what tells a process to compile for it."""
        return {"NUMBA_CPU_NAME": self.cpu, "NUMBA_CPU_FEATURES": self.features}

    def marker(self, folder: Path) -> Path:
        """Returns the file that says that a folder has all kernels of these sources for it."""
        return folder / f"{MARKER}{environment_digest(self.cpu, self.features)}"

    def is_complete_in(self, folder: Path) -> bool:
        """Whether a folder has all kernels of these sources for it; False if this user cannot read it."""
        try:
            return self.marker(folder).exists()
        except OSError:
            return False


LEVELS = {
    "x86-64-v3": CpuLevel.of("x86-64-v3", _V3),
    "x86-64-v3-vnni": CpuLevel.of("x86-64-v3", (*_V3, "avxvnni")),
    "x86-64-v4": CpuLevel.of("x86-64-v4", _V4),
    "x86-64-v4-vnni": CpuLevel.of("x86-64-v4", (*_V4, "avx512vnni")),
    "x86-64-v4-bf16": CpuLevel.of("x86-64-v4", (*_V4, "avx512vnni", "avx512bf16")),
}
"""By name, the lowest first. VNNI makes int8 products fast, which Intel's desktops have without AVX-512; products of
bfloat16 need the last."""


def target() -> CpuLevel:
    """Returns the processor that this process compiles for."""
    return CpuLevel(_config.CPU_NAME or binding.get_host_cpu_name(), target_features())


def use_compiled_level() -> str | None:
    """Makes this process use the kernels of a level, if they are the ones to use; returns its name.

    It must be called before kernels are imported. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override it.
    """
    if _config.CPU_NAME is not None or _config.CPU_FEATURES is not None or not COMPILED.is_dir():
        return None
    cpu, folder = target(), cache_folder()
    if folder is not None and cpu.is_complete_in(folder):
        return None
    for name, level in reversed(LEVELS.items()):
        if level.runs_with(cpu.features) and level.is_complete_in(COMPILED):
            _config.CPU_NAME, _config.CPU_FEATURES = level.cpu, level.features
            return name
    return None
