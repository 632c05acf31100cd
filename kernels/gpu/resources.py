"""Resources of a compiled kernel: registers, shared memory and spills."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        kernel: its name.
        num_warps, num_stages: launch options it was compiled with.
        num_registers: of each thread (NVIDIA), or vector registers of each lane (AMD).
        shared_bytes: shared memory (LDS) of a program.
        stack_bytes: local memory of each thread: registers that were spilled, and arrays indexed at run time.
        binary_bytes: size of the cubin or hsaco.
    """

    kernel: str
    num_warps: int
    num_stages: int
    num_registers: int
    shared_bytes: int
    stack_bytes: int
    binary_bytes: int


def read_resources(compiled: Any) -> Resources:
    """Reads the resources of one of Triton's compiled kernels; needs no GPU."""
    if "cubin" in compiled.asm:
        binary = compiled.asm["cubin"]
        registers, stack, static_shared = _read_cubin(binary)
    else:
        binary = compiled.asm["hsaco"]
        registers, stack, static_shared = (
            _amdgcn_field(compiled.asm["amdgcn"], name)
            for name in ("vgpr_count", "private_segment_fixed_size", "group_segment_fixed_size")
        )
    return Resources(
        kernel=compiled.name,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        num_registers=registers,
        shared_bytes=max(compiled.metadata.shared, static_shared),
        stack_bytes=stack,
        binary_bytes=len(binary),
    )


def _read_cubin(cubin: bytes) -> tuple[int, int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, f"cuobjdump says nothing of resources: {text}"
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack + local, shared


def _amdgcn_field(text: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", text)
    assert found, f"the assembly does not say .{name}"
    return int(found.group(1))
