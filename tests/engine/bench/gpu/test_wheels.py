"""Wheels of the frontend's packages for a machine without a network."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.gpu import wheels


def write_wheel(folder: Path, name: str, module: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module.replace('.', '/')}/__init__.py", "is_unpacked = True\n")


@pytest.fixture
def missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "FRONTEND_NEEDS", {"no_such_module": "no-such-module", "google.nothing": "nothing"})


def test_installed_packages_need_no_wheels(tmp_path: Path) -> None:
    assert wheels.frontend_path(tmp_path, {}) == ()


def test_error_names_missing_packages_and_what_to_do(missing_packages: None, tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"needs no-such-module, nothing: .* set CHAIRLIFT_WHEELS to it"):
        wheels.frontend_path(tmp_path, {})


def test_wheels_are_unpacked_and_importable(missing_packages: None, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "no_such_module", "no_such_module")
    write_wheel(folder, "nothing", "google.nothing")
    (path,) = wheels.frontend_path(tmp_path, {"CHAIRLIFT_WHEELS": str(folder)})
    # google is also a folder of protobuf's, elsewhere on the path
    code = "import no_such_module, google.nothing, google.protobuf; print(google.nothing.is_unpacked)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(path)}, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_error_names_a_missing_wheel(missing_packages: None, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "no_such_module", "no_such_module")
    with pytest.raises(BenchmarkError, match="needs nothing: "):
        wheels.frontend_path(tmp_path, {"CHAIRLIFT_WHEELS": str(folder)})


def test_a_folder_without_wheels_and_a_broken_wheel_are_errors(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    environ = {"CHAIRLIFT_WHEELS": str(folder)}
    with pytest.raises(BenchmarkError, match="holds no wheels"):
        wheels.frontend_path(tmp_path, environ)
    (folder / "a.whl").write_bytes(b"no archive")
    with pytest.raises(BenchmarkError, match=r"a\.whl: cannot be unpacked"):
        wheels.frontend_path(tmp_path, environ)
