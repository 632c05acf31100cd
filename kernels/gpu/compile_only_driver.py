"""A Triton driver that needs no GPU: kernels are compiled for any target, and launches do nothing."""

import itertools
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from kernels.gpu.targets import Target

_MAX_THREADS = 1024
_device_numbers = itertools.count()


class CompileOnlyDriver(DriverBase):  # type: ignore[misc]
    """Implements Triton's driver interface; a launch ends where it would pass the kernel to the GPU.

    Attributes:
        utils, launcher_cls: Triton's names for what loads a kernel and what launches it.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = GPUTarget(target.backend, target.arch, target.warp_size)
        self._device = next(_device_numbers)  # Triton keys compiled kernels by the device number
        self.utils = _Utils(target.max_shared_bytes)
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        """Returns False: it is never chosen automatically."""
        return False

    def get_current_target(self) -> GPUTarget:
        """Returns the compile target."""
        return self._target

    def get_current_device(self) -> int:
        """Returns a number unique among these drivers of the process."""
        return self._device

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - there is but one
        """Returns an arbitrary stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Returns the meta device, which has shapes only."""
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not supported: needed only by generated launchers."""
        raise NotImplementedError(f"no launcher is generated (C++ type of {ty})")

    def get_benchmarker(self) -> Any:
        """Not supported: needed only for autotuning."""
        raise NotImplementedError("nothing runs, so nothing can be measured")


class _Utils:
    """Device functions of the driver."""

    def __init__(self, max_shared_bytes: int) -> None:
        self._max_shared_bytes = max_shared_bytes

    def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002 - there is but one
        return {"max_shared_mem": self._max_shared_bytes}

    def load_binary(self, *_: object) -> tuple[None, None, int, int, int]:
        """Returns module, function, registers, spills and threads per block."""
        return None, None, 0, 0, _MAX_THREADS


class _Launcher:
    """Launcher of one kernel."""

    def __init__(self, src: object, metadata: object) -> None:
        """Ignores its arguments."""

    def __call__(self, *_: object) -> None:
        """Launches nothing."""


def use_compile_only_driver(target: Target) -> None:
    """Makes this process compile for a target from now on.

    Raises: RuntimeError: Triton's interpreter is on; it does not compile.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled")
    triton.runtime.driver.set_active(CompileOnlyDriver(target))
