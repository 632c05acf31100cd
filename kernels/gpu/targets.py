"""GPU architectures that kernels are compiled for, and their features."""

from dataclasses import dataclass
from typing import Literal

import torch

_KIB = 1024


class UnsupportedTargetError(ValueError):
    """A GPU or feature without kernels; the message says what is missing and what is supported."""


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture.

    Attributes:
        name: common name.
        backend, arch, warp_size: as Triton's `GPUTarget` has them.
        max_shared_bytes: most shared memory (LDS) of one program.
        fp8_dtype: the 8-bit float with 3 bits of mantissa of its matrix units and conversions; None if it has none.
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    max_shared_bytes: int
    fp8_dtype: torch.dtype | None

    def require_fp8(self, what: str) -> torch.dtype:
        """Returns the target's 8-bit float.

        Raises: UnsupportedTargetError: it has none; `what` is the flag that needs it.
        """
        if self.fp8_dtype is None:
            raise UnsupportedTargetError(
                f"{what}: {self.name} has no 8-bit floats; they came with sm_89 (Ada, Hopper and later)"
            )
        return self.fp8_dtype


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * _KIB, None),
        Target("sm_86", "cuda", 86, 32, 99 * _KIB, None),
        Target("sm_89", "cuda", 89, 32, 99 * _KIB, torch.float8_e4m3fn),
        Target("sm_90", "cuda", 90, 32, 227 * _KIB, torch.float8_e4m3fn),
        Target("sm_100", "cuda", 100, 32, 227 * _KIB, torch.float8_e4m3fn),
        Target("sm_120", "cuda", 120, 32, 99 * _KIB, torch.float8_e4m3fn),
        Target("gfx942", "hip", "gfx942", 64, 64 * _KIB, torch.float8_e4m3fnuz),
    )
}
"""By name. CUDA's programming guide, table of compute capabilities; AMD's CDNA 3 white paper."""


def target_of(device: torch.device) -> Target:
    """Returns the target of a GPU.

    Raises: UnsupportedTargetError: its architecture is unknown or too old.
    """
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
        if properties.major == 10:  # 100 and 103 run the same kernels
            name = "sm_100"
    if name not in TARGETS:
        raise UnsupportedTargetError(
            f"{properties.name} is {name}; there are kernels for {', '.join(TARGETS)}. Use --device cpu"
        )
    return TARGETS[name]
