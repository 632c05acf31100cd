"""Resources of a compiled kernel: registers, shared memory and spills; and the order of its matrix products."""

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
        has_serial_products: whether the binary waits for `wgmma` more often per product than its PTX: ptxas makes every
            product synchronous if other instructions use the registers of one in flight.
    """

    kernel: str
    num_warps: int
    num_stages: int
    num_registers: int
    shared_bytes: int
    stack_bytes: int
    binary_bytes: int
    has_serial_products: bool


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
    ptx = compiled.asm.get("ptx", "")
    return Resources(
        kernel=compiled.name,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        num_registers=registers,
        shared_bytes=max(compiled.metadata.shared, static_shared),
        stack_bytes=stack,
        binary_bytes=len(binary),
        has_serial_products="wgmma.mma_async" in ptx and _has_serial_products(ptx, binary),
    )


def _has_serial_products(ptx: str, cubin: bytes) -> bool:
    """Compares waits per product, because ptxas unrolls loops."""
    code = _inspect(cubin, triton.knobs.nvidia.nvdisasm.path, "--print-code")
    num_waits, num_products = code.count("WARPGROUP.DEPBAR"), len(re.findall(r"\b[A-Z]GMMA\b", code))
    return num_waits * ptx.count("wgmma.mma_async") > num_products * ptx.count("wgmma.wait_group")


def _inspect(cubin: bytes, *command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([*command, path], check=True, capture_output=True, text=True).stdout


def _read_cubin(cubin: bytes) -> tuple[int, int, int]:
    text = _inspect(cubin, triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, f"cuobjdump says nothing of resources: {text}"
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack + local, shared


def _amdgcn_field(text: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", text)
    assert found, f"the assembly does not say .{name}"
    return int(found.group(1))
