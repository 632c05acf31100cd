"""GPU architectures that kernels are compiled for, and their features."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

_KIB = 1024


class UnsupportedTargetError(ValueError):
    """A GPU, a feature or a size of the model without kernels; the message says which, and what is supported."""


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture.

    Attributes:
        name: common name.
        backend, arch, warp_size: as Triton's `GPUTarget` has them.
        max_shared_bytes: most shared memory (LDS) of one program.
        fp8_dtype: the 8-bit float with 3 bits of mantissa of its matrix units and conversions; None if it has none.
        has_bfloat16: whether its matrix units and conversions support bfloat16.
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    max_shared_bytes: int
    fp8_dtype: torch.dtype | None
    has_bfloat16: bool = True

    @property
    def half_dtype(self) -> torch.dtype:
        """The 16-bit dtype of most models on it."""
        return torch.bfloat16 if self.has_bfloat16 else torch.float16

    def require_fp8(self, what: str) -> torch.dtype:
        """Returns the target's 8-bit float.

        Raises: UnsupportedTargetError: it has none; `what` is the flag that needs it.
        """
        if self.fp8_dtype is None:
            raise UnsupportedTargetError(
                f"{what}: {self.name} has no 8-bit floats; they came with sm_89 and gfx942. Omit {what}"
            )
        return self.fp8_dtype


_E4M3, _E4M3_FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

TARGETS = {
    target.name: target
    for target in (
        Target("sm_75", "cuda", 75, 32, 64 * _KIB, None, has_bfloat16=False),
        Target("sm_80", "cuda", 80, 32, 163 * _KIB, None),
        Target("sm_86", "cuda", 86, 32, 99 * _KIB, None),
        Target("sm_87", "cuda", 87, 32, 163 * _KIB, None),
        Target("sm_89", "cuda", 89, 32, 99 * _KIB, _E4M3),
        Target("sm_90", "cuda", 90, 32, 227 * _KIB, _E4M3),
        Target("sm_100", "cuda", 100, 32, 227 * _KIB, _E4M3),
        Target("sm_110", "cuda", 110, 32, 227 * _KIB, _E4M3),
        Target("sm_120", "cuda", 120, 32, 99 * _KIB, _E4M3),
        Target("gfx90a", "hip", "gfx90a", 64, 64 * _KIB, None),
        Target("gfx942", "hip", "gfx942", 64, 64 * _KIB, _E4M3_FNUZ),
        Target("gfx950", "hip", "gfx950", 64, 160 * _KIB, _E4M3),
        Target("gfx1100", "hip", "gfx1100", 32, 64 * _KIB, None),
    )
}
"""By name. CUDA's programming guide, table of compute capabilities; AMD's white papers on CDNA and instruction set
guides of RDNA."""

_SAME_AS = {
    "sm_103": "sm_100",
    "sm_121": "sm_120",
    **dict.fromkeys(
        ("gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx1200", "gfx1201"), "gfx1100"
    ),
}
"""GPUs with the features and tiles of another target; their kernels are compiled for themselves."""

ARCHITECTURES = (*TARGETS, *_SAME_AS)
"""Names of all GPU architectures with kernels."""


def find_target(name: str) -> Target | None:
    """Returns the target of a GPU architecture, which may have the name and tiles of another; None: no kernels."""
    target = TARGETS.get(_SAME_AS.get(name, name))
    if target is None or name in TARGETS:
        return target
    return replace(target, arch=int(name.removeprefix("sm_")) if target.backend == "cuda" else name)


def target_of(device: torch.device) -> Target:
    """Returns the target of a GPU.

    Raises: UnsupportedTargetError: its architecture is unknown or too old.
    """
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    target = find_target(name)
    if target is None:
        raise UnsupportedTargetError(
            f"{properties.name} is {name}; there are kernels for {', '.join(ARCHITECTURES)}. Use "
            "--kernels torch, which is slower but runs on any GPU, or --device cpu"
        )
    return target
