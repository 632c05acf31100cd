"""Makes MKL take the code that it has for Intel's CPUs, also on AMD's, where it listens to no variable."""

import shutil
import subprocess
from pathlib import Path

_CODE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def intel_paths(folder: Path) -> dict[str, str]:
    """Variables of a process whose MKL is to do so; none where there is no C compiler.

    MKL asks a function of its own for the maker of the CPU. A library that is loaded first answers instead.

    Args:
        folder: to compile the library into.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    library = folder / "intel_paths.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=_CODE, text=True, check=True)
    return {"LD_PRELOAD": str(library)}
