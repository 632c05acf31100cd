"""Packages of the frontend for a machine without a network: wheels in the folder CHAIRLIFT_WHEELS.

Without its HTTP API the frontend needs a few small packages beside grpcio; the engine and the load generator need none
of them.
"""

import importlib.util
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from chairlift.bench.benchmark import BenchmarkError

VARIABLE = "CHAIRLIFT_WHEELS"
FRONTEND_NEEDS = {
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "google.rpc": "googleapis-common-protos",
    "jinja2": "jinja2",
    "prometheus_client": "prometheus-client",
    "tokenizers": "tokenizers",
}
"""Import name to distribution."""


def frontend_path(scratch: Path, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Returns folders to add to the path of the frontend's process: none, or the unpacked wheels.

    Args:
        scratch: folder to unpack them into.
        environ: environment, which may have CHAIRLIFT_WHEELS.
    Raises: BenchmarkError: a package is missing, or the folder holds no wheels.
    """
    folder = environ.get(VARIABLE)
    unpacked = () if not folder else (_unpack(Path(folder), scratch / "wheels"),)
    missing = [needed for name, needed in FRONTEND_NEEDS.items() if not _is_there(name, unpacked)]
    if missing:
        raise BenchmarkError(
            f"the frontend needs {', '.join(missing)}: on a machine with a network, run `python3 -m pip download "
            f"--no-deps -d wheels {' '.join(missing)}`, copy the folder here and set {VARIABLE} to it"
        )
    return unpacked


def _unpack(folder: Path, into: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise BenchmarkError(f"{VARIABLE}={folder}: holds no wheels")
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
        except (OSError, zipfile.BadZipFile) as error:
            raise BenchmarkError(f"{wheel}: cannot be unpacked: {error}") from error
    return into


def _is_there(name: str, folders: tuple[Path, ...]) -> bool:
    """Tells whether a module can be found, without importing it; `google` is a namespace package."""
    relative = Path(*name.split("."))
    places = [*folders, *(Path(entry or ".") for entry in sys.path)]
    if any((place / relative).is_dir() or (place / relative).with_suffix(".py").is_file() for place in places):
        return True
    return "." not in name and importlib.util.find_spec(name) is not None
