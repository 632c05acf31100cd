"""A driver for a GPU that is not there: with it Triton compiles for any target on any machine, and launches nothing."""

import itertools
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from kernels.gpu.targets import Target

_MAX_THREADS = 1024
_device_numbers = itertools.count()


class StandInDriver(DriverBase):  # type: ignore[misc]
    """What Triton asks of a driver; a launch comes as far as its kernel would be handed to the GPU.

    Attributes:
        utils, launcher_cls: Triton's names for what loads a kernel and what launches it.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = GPUTarget(target.backend, target.arch, target.warp_size)
        self._device = next(_device_numbers)  # Triton keeps what it has compiled by the device's number
        self.utils = _Utils(target.max_shared_bytes)
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        """Never chosen by itself."""
        return False

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """A number that no other stand-in of the process has."""
        return self._device

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - there is but one
        """Any."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where there are shapes only."""
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Asked for by launchers that Triton generates; there is none."""
        raise NotImplementedError(f"no launcher is generated (C++ type of {ty})")

    def get_benchmarker(self) -> Any:
        """Asked for by autotuning; there is none."""
        raise NotImplementedError("nothing runs, so nothing can be measured")


class _Utils:
    """The device."""

    def __init__(self, max_shared_bytes: int) -> None:
        self._max_shared_bytes = max_shared_bytes

    def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002 - there is but one
        return {"max_shared_mem": self._max_shared_bytes}

    def load_binary(self, *_: object) -> tuple[None, None, int, int, int]:
        """Module, function, registers, spills, threads per block."""
        return None, None, 0, 0, _MAX_THREADS


class _Launcher:
    """Of one kernel."""

    def __init__(self, src: object, metadata: object) -> None:
        """Needs nothing of them."""

    def __call__(self, *_: object) -> None:
        """Launches nothing."""


def use_stand_in(target: Target) -> None:
    """Makes this process compile for a target from now on.

    Raises: RuntimeError: Triton's interpreter is on, which compiles nothing.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled")
    triton.runtime.driver.set_active(StandInDriver(target))
