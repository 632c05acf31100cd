"""Virtual environments for peers, each made once per set of versions and kept in the user's cache folder.

Their own, because peers want other versions of packages than we do, and because nothing of a peer is imported here.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chairlift.bench.benchmark import BenchmarkError

_FINISHED = "finished"  # written last: an environment without it was left half made
_INSTALL_TIMEOUT_S = 3600.0
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Environment:
    """What an environment has.

    Attributes:
        name: of the peer; begins the name of its folder.
        requirements: for pip.
        unwanted: packages that are installed as dependencies and removed again.
        pip_flags: further arguments of `pip install`.
        variables: of `pip install`, added to the environment of this process.
        machine: what else a build depends on.
    """

    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    pip_flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        parts = (sys.version, *self.requirements, *self.pip_flags, *map(str, self.variables.items()), self.machine)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        return cache_dir() / f"{self.name}-{digest}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def exists(self) -> bool:
        """Whether it is complete."""
        return (self.folder / _FINISHED).is_file()

    def make(self, progress: Callable[[str], None]) -> Path:
        """Makes it unless it exists; returns its interpreter.

        Raises: BenchmarkError: it cannot be made; with the last lines of pip.
        """
        if self.exists:
            return self.python
        progress(f"making an environment with {', '.join(self.requirements)} in {self.folder}")
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            venv.create(self.folder, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:  # no room, or a Python without ensurepip
            raise BenchmarkError(f"no virtual environment in {self.folder}: {error}") from error
        pip = (self.python, "-m", "pip")
        run_command(
            [*pip, "install", "--quiet", *self.pip_flags, *self.requirements], _INSTALL_TIMEOUT_S, self.variables
        )
        if self.unwanted:
            run_command([*pip, "uninstall", "--quiet", "--yes", *self.unwanted], _INSTALL_TIMEOUT_S)
        (self.folder / _FINISHED).write_text("\n".join(self.requirements) + "\n")
        return self.python


def cache_dir() -> Path:
    """Where this project keeps what is dear to make: $XDG_CACHE_HOME/chairlift, else ~/.cache/chairlift."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift"


def run_command(command: Sequence[str | Path], timeout_s: float, variables: Mapping[str, str] | None = None) -> None:
    """Runs a command to its end.

    Args:
        command: program and arguments.
        timeout_s: seconds after which it is killed.
        variables: added to the environment of this process.
    Raises: BenchmarkError: it fails or takes longer; with its last lines.
    """
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**os.environ, **(variables or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{' '.join(map(str, command))}: no end after {timeout_s:g} s") from error
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise BenchmarkError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{last}")
