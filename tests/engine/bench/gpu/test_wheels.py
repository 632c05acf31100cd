"""Wheels that are carried to a machine without a network."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.__main__ import main
from engine.bench.gpu import wheels


def write_wheel(folder: Path, name: str, module: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module.replace('.', '/')}/__init__.py", "is_unpacked = True\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where wheels are carried; the two packages that servers need are not installed."""
    monkeypatch.setattr(wheels, "SERVING_NEEDS", {"no_such_module": "no-such-module", "google.nothing": "nothing"})
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def test_error_names_missing_packages_and_what_to_do(folder: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"need no-such-module, nothing: .* set CHAIRLIFT_WHEELS to it"):
        wheels.require_serving_packages()


def test_without_wheels_nothing_changes() -> None:
    environ: dict[str, str] = {}
    with wheels.carried_wheels(environ):
        assert environ == {}


def test_packages_of_wheels_are_found_here_and_by_child_processes(folder: Path) -> None:
    write_wheel(folder, "no_such_module", "no_such_module")
    write_wheel(folder, "nothing", "google.nothing")
    environ = {"CHAIRLIFT_WHEELS": str(folder), "PYTHONPATH": "protos"}
    # google is also a folder of protobuf's, elsewhere on the path
    code = "import no_such_module, google.nothing, google.protobuf; print(google.nothing.is_unpacked)"
    with wheels.carried_wheels(environ):
        wheels.require_serving_packages()
        assert set(environ) == {"PYTHONPATH"}
        assert environ["PYTHONPATH"].endswith(":protos")
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
        assert done.stdout == "True\n", done.stderr
    assert environ == {"CHAIRLIFT_WHEELS": str(folder), "PYTHONPATH": "protos"}
    with pytest.raises(BenchmarkError):
        wheels.require_serving_packages()


def test_error_names_a_missing_wheel(folder: Path) -> None:
    write_wheel(folder, "no_such_module", "no_such_module")
    with (
        wheels.carried_wheels({"CHAIRLIFT_WHEELS": str(folder)}),
        pytest.raises(BenchmarkError, match="need nothing: "),
    ):
        wheels.require_serving_packages()


def test_a_folder_without_wheels_and_a_broken_wheel_are_errors_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHAIRLIFT_WHEELS", str(folder))
    assert main(["list"]) == 1
    assert capsys.readouterr().err == f"engine.bench: error: CHAIRLIFT_WHEELS={folder}: holds no wheels\n"
    (folder / "a.whl").write_bytes(b"no archive")
    assert main(["list"]) == 1
    assert "a.whl: cannot be unpacked" in capsys.readouterr().err
