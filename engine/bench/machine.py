"""Description of this machine."""

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engine.startup.machine import available_memory_bytes, usable_cpus

_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_DISTRIBUTIONS = ("torch", "numba", "numpy", "grpcio", "transformers")


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and software versions.

    Attributes:
        cpu_flags: relevant vector extensions that this CPU has.
        versions: of Python and the relevant libraries.
    """

    cpu: str
    usable_cpus: int
    cpu_flags: tuple[str, ...]
    available_memory_bytes: int
    versions: dict[str, str]

    @classmethod
    def here(cls, cpuinfo: Path = Path("/proc/cpuinfo")) -> "Machine":
        """Describes this machine."""
        fields: dict[str, str] = {}
        for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
        flags = set(fields.get("flags", "").split())
        installed = {dist.name.lower(): dist.version for dist in metadata.distributions() if dist.name}
        return cls(
            cpu=fields.get("model name") or platform.processor() or platform.machine(),
            usable_cpus=usable_cpus(),
            cpu_flags=tuple(flag for flag in _FLAGS if flag in flags),
            available_memory_bytes=available_memory_bytes(),
            versions={
                "python": platform.python_version(),
                **{name: installed[name] for name in _DISTRIBUTIONS if name in installed},
            },
        )
