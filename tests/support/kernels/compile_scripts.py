"""Python scripts that compile GPU kernels, in processes of their own without Triton's interpreter."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

KERNELS = """
    import torch
    import triton
    import triton.language as tl

    from kernels.gpu.launch import CompileCounter, compile_only, launch
    from kernels.gpu.compile_check import compile_calls, find_faults, find_live_compiles
    from kernels.gpu.row_specializations import Call
    from kernels.gpu.specializations import FAMILIES, Family
    from kernels.gpu.compile_only_driver import use_compile_only_driver
    from kernels.gpu.targets import TARGETS, UnsupportedTargetError

    use_compile_only_driver(TARGETS["sm_80"])
    values = torch.empty(1024, device="meta")
"""

NEGATE = """
    @triton.jit
    def negate(ptr, n, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        tl.store(ptr + offsets, -tl.load(ptr + offsets, mask=offsets < n), mask=offsets < n)
"""


def run(*command: str, paths: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with Triton's interpreter off; `paths` come first among the places of modules."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*map(str, paths), *sys.path)))
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


def script(tmp_path: Path, kernel: str, body: str) -> None:
    """Runs a kernel and a body from a file, where Triton reads kernels."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(KERNELS) + textwrap.dedent(kernel) + textwrap.dedent(body))
    result = run(str(path))
    assert result.returncode == 0, result.stdout + result.stderr
