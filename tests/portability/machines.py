"""CPUs that this one can pretend to be, as far as compilers and libraries believe what they are told.

numba, PyTorch, oneDNN, MKL and OpenBLAS each choose instructions by variables of their own. What this cannot show:
another clock, other caches, and instructions that this CPU lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """A CPU.

    Attributes:
        name: LLVM's; empty is the CPU as it is.
        features: instruction sets that the kernels may use on it, as /proc/cpuinfo names them.
        libraries: variables of PyTorch, oneDNN, MKL and numpy's OpenBLAS.
    """

    name: str = ""
    features: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """Of a process that is to believe it."""
        if not self.name:
            return dict(self.libraries)
        features = ",".join(f"+{_LLVM_NAMES.get(feature, feature)}" for feature in self.features)
        return {"NUMBA_CPU_NAME": self.name, "NUMBA_CPU_FEATURES": features, **self.libraries}

    @property
    def missing(self) -> set[str]:
        """Features that this CPU lacks, so that it cannot pretend."""
        return set(self.features) - _flags()


@cache
def _flags() -> frozenset[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))


def _libraries(aten: str, onednn: str, mkl: str, openblas: str) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,  # heard on Intel's CPUs only
        "OPENBLAS_CORETYPE": openblas,
    }


_LLVM_NAMES = {
    "sse4_2": "sse4.2",
    "bmi1": "bmi",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
}
_AVX2 = ("sse4_2", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")

MACHINES = {
    "native": Machine(),
    "generic": Machine("generic", (), _libraries("default", "SSE41", "SSE4_2", "Nehalem")),
    "haswell": Machine("haswell", _AVX2, _libraries("avx2", "AVX2", "AVX2", "Haswell")),
    "znver2": Machine("znver2", _AVX2, _libraries("avx2", "AVX2", "AVX2", "Zen")),
    "skylake-avx512": Machine("skylake-avx512", _AVX512, _libraries("avx512", "AVX512_CORE", "AVX512", "SkylakeX")),
    "cooperlake": Machine("cooperlake", _BF16, _libraries("avx512", "AVX512_CORE_BF16", "AVX512", "Cooperlake")),
}
"""By name; the last is what sapphirerapids has without AMX."""
