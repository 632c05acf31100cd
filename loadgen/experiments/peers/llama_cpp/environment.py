"""The environment of llama-cpp-python, which brings llama.cpp's sources: built here, for this processor.

The build takes 2 minutes on two cores and needs CMake and a C++ compiler. Its flags are those of llama.cpp's own build
(`-march=native`, tinyBLAS for F32, F16 and BF16, repacked weights, OpenMP). Left out are the library for images, that
of llama.cpp's command-line programs, which is half of the build, and products with AMX: they end the process with
SIGSEGV at the first step of a Q8_0 or Q4_K file (https://github.com/ggml-org/llama.cpp/issues/20824).

`python -m loadgen.experiments.peers.llama_cpp.environment` builds it ahead and prints its interpreter.
"""

import hashlib
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from chairlift.bench.benchmark import BenchmarkError
from loadgen.experiments.peers.environment import Environment, cache_dir

PACKAGE = "llama-cpp-python"
REQUIREMENTS = (f"{PACKAGE}==0.3.36",)
_CMAKE_ARGS = "-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DLLAVA_BUILD=OFF"
_WITHOUT_PROGRAMS = "set(LLAMA_BUILD_COMMON OFF)  # in llama.cpp's own scope: the package sets it for all\n"
_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_COMPILERS = ("c++", "g++", "clang++")
_CPUINFO = Path("/proc/cpuinfo")


def llama_environment() -> Environment:
    """The environment for this processor."""
    flags = _instruction_sets()
    included = shlex.quote(f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={_included_file()}")
    variables = {"CMAKE_ARGS": f"{_CMAKE_ARGS} {included}"}
    if "amx_tile" in flags.split():  # older compilers, for older processors, do not know the options
        for name in ("CFLAGS", "CXXFLAGS"):
            variables[name] = f"{os.environ.get(name, '')} {_WITHOUT_AMX}".strip()
    return Environment(
        "llama-cpp",
        REQUIREMENTS,
        pip_flags=("--no-binary", PACKAGE, "--no-cache-dir"),  # pip would take a wheel built with other flags
        variables=variables,
        machine=f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()}",
    )


def llama_python(progress: Callable[[str], None]) -> Path:
    """The interpreter of the environment, which is built if it is not there.

    Raises: BenchmarkError: a tool is missing, or the build fails; with the last lines of pip.
    """
    environment = llama_environment()
    if not environment.exists:
        require_build_tools()
        _included_file().parent.mkdir(parents=True, exist_ok=True)
        _included_file().write_text(_WITHOUT_PROGRAMS)
    return environment.make(progress)


def require_build_tools() -> None:
    """Raises BenchmarkError if CMake or a C++ compiler is missing; names it."""
    compilers = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    missing = [
        what
        for what, programs in (("cmake", ("cmake",)), (f"a C++ compiler ({' or '.join(compilers)})", compilers))
        if not any(map(shutil.which, programs))
    ]
    if missing:
        raise BenchmarkError(f"llama.cpp is built from {REQUIREMENTS[0]}'s sources: {' and '.join(missing)} not found")


def _included_file() -> Path:
    """What CMake includes at the beginning of llama.cpp's project."""
    return cache_dir() / "llama-cpp.cmake"


def _instruction_sets() -> str:
    """What `-march=native` stands for: a build for another processor may end with SIGILL."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def main() -> int:
    """Builds the environment; returns the exit status."""
    try:
        print(llama_python(print))
    except BenchmarkError as error:
        print(f"loadgen.experiments.peers.llama_cpp.environment: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
