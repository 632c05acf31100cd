"""Packages for a machine without a network: wheels in the folder CHAIRLIFT_WHEELS.

They are unpacked into a temporary folder, which is put in front of the module path of this process and its children.
"""

import importlib.util
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from chairlift.bench.benchmark import BenchmarkError

VARIABLE = "CHAIRLIFT_WHEELS"
SERVING_NEEDS = {
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "google.rpc": "googleapis-common-protos",
    "jinja2": "jinja2",
    "prometheus_client": "prometheus-client",
    "tokenizers": "tokenizers",
}
"""What the servers of an engine and a frontend need beside gRPC: import name to distribution."""


@contextmanager
def carried_wheels(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Makes the packages in the folder CHAIRLIFT_WHEELS, if it is set, importable here and in child processes.

    Raises: BenchmarkError: the folder holds no wheels, or a broken one.
    """
    folder = environ.get(VARIABLE)
    if not folder:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="chairlift-wheels-") as unpacked:
        _unpack(Path(folder), Path(unpacked))
        path = environ.get("PYTHONPATH", "")
        del environ[VARIABLE]  # children find the packages, and need not unpack them
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [unpacked, path]))
        sys.path.insert(0, unpacked)
        try:
            yield
        finally:
            sys.path.remove(unpacked)
            environ.update({VARIABLE: folder, "PYTHONPATH": path})


def missing_serving_packages() -> list[str]:
    """Returns the distributions that servers need and that are not installed."""
    return [needed for name, needed in SERVING_NEEDS.items() if not _is_there(name)]


def require_serving_packages() -> None:
    """Requires what servers need beside gRPC.

    Raises: BenchmarkError: a package is missing; names it, and what to do.
    """
    if missing := missing_serving_packages():
        raise BenchmarkError(
            f"the servers need {', '.join(missing)}: on a machine with a network, run `python3 -m pip download "
            f"--no-deps -d wheels {' '.join(missing)}`, copy the folder here and set {VARIABLE} to it"
        )


def _unpack(folder: Path, into: Path) -> None:
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise BenchmarkError(f"{VARIABLE}={folder}: holds no wheels")
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
        except (OSError, zipfile.BadZipFile) as error:
            raise BenchmarkError(f"{wheel}: cannot be unpacked: {error}") from error


def _is_there(name: str) -> bool:
    """Tells whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor can its package
        return False
