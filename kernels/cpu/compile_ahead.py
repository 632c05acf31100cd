"""`python -m kernels.cpu.compile_ahead LEVEL ...`: compiles the CPU kernels before the first start, for these levels.

Their kernels come beside the sources, where `cpu_levels` finds them, as images have them. `native` compiles for this
CPU, into the cache of kernels. Nothing that is compiled runs: a machine can compile for levels that it lacks. On other
architectures levels are skipped.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence

from kernels.cpu.cpu_levels import LEVELS, target
from kernels.cpu.kernel_cache import COMPILED, cache_folder

_NATIVE, _HERE = "native", "--here"


def main(arguments: Sequence[str]) -> int:
    """Compiles for all levels at once, each in a process of its own; returns the exit status."""
    if list(arguments) == [_HERE]:
        return _compile_here()
    parser = argparse.ArgumentParser(
        prog="python -m kernels.cpu.compile_ahead", description="Compiles the CPU kernels."
    )
    parser.add_argument("levels", nargs="+", choices=[*LEVELS, _NATIVE], metavar="LEVEL")
    levels = parser.parse_args(arguments).levels
    if platform.machine() != "x86_64":
        levels = [name for name in levels if name == _NATIVE]
    processes = []
    for name in levels:
        variables = {"NUMBA_CACHE_DIR": str(COMPILED.parent), **LEVELS[name].variables()} if name != _NATIVE else {}
        processes.append(subprocess.Popen([sys.executable, "-m", __spec__.name, _HERE], env=os.environ | variables))
    status = max((process.wait() for process in processes), default=0)
    if set(levels) - {_NATIVE} and COMPILED.is_dir():
        COMPILED.chmod(0o755)
        for file in COMPILED.iterdir():
            file.chmod(0o644)  # others read what a cache keeps for its user alone
    return status


def _compile_here() -> int:
    """Compiles for the processor that numba was told, and says so in the folder."""
    import kernels.cpu.threads  # noqa: F401 - selects the layer of numba's threads
    from kernels.cpu.execute import compile_items
    from kernels.cpu.sample import compile_sampler
    from kernels.cpu.worker_pool import compile_loop

    compile_loop()
    compile_items()
    compile_sampler()
    folder = cache_folder()
    if folder is None:
        print("there is no home folder to compile to", file=sys.stderr)  # noqa: T201 - a command
        return 1
    target().marker(folder).touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
