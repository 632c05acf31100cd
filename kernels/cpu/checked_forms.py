"""Remembers which forms of the CPU kernels have passed a check with this CPU, these packages and these sources.

Compiled kernels depend on nothing else, so a check need not be repeated at every start.
"""

import contextlib
import hashlib
from functools import cache
from pathlib import Path

from kernels.cpu.cpu_levels import target
from kernels.cpu.kernel_cache import cache_folder, digest_of, kernel_sources

_REFERENCES = Path(__file__).parents[1] / "reference"


def is_checked(form: str) -> bool:
    """Whether a form passed before; False if nothing can be remembered."""
    try:
        return _key(form) in _file().read_text(errors="replace").splitlines()
    except OSError:
        return False


def remember_checked(form: str) -> None:
    """Remembers that a form passed, if the cache folder of the kernels is writable."""
    with contextlib.suppress(OSError), _file().open("a") as lines:
        lines.write(f"{_key(form)}\n")


def _file() -> Path:
    folder = cache_folder()
    if folder is None:
        raise FileNotFoundError("kernels are not cached")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"checked-{_environment()}.txt"


def _key(form: str) -> str:
    return hashlib.sha256(form.encode()).hexdigest()


@cache
def _environment() -> str:
    """Returns a hash of everything but the form on which the result of a check depends."""
    sources = digest_of([*kernel_sources(), *_REFERENCES.glob("*.py")], ("llvmlite", "numba", "numpy", "torch"))
    return hashlib.sha256(f"{sources} {target()}".encode()).hexdigest()[:16]
