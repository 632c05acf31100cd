"""Rules of the tree that no single module can hold: imports one way, stubs fresh, files small."""

import runpy
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_imports_go_one_way() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_committed_stubs_are_what_the_protos_say(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "protos" / "generate.py"))["generate"](tmp_path)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    assert len(fresh) == 8
    for path, text in fresh.items():
        assert (ROOT / "protos" / path).read_text() == text, f"{path} is stale: make stubs"


def test_kernels_package_is_empty() -> None:
    # transformers probes for a package of this name and looks at what it exports
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_every_package_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in ("engine", "frontend", "kernels", "loadgen")
        for path in (ROOT / top).rglob("__init__.py")
    }
    found |= {"engine.demo.model"}  # folders of data
    found |= {"loadgen.report.templates"}
    assert found == {name for name in declared if not name.startswith("chairlift")}


@pytest.mark.parametrize("top", ["engine", "frontend", "kernels", "loadgen"])
def test_no_file_has_grown_into_two(top: str) -> None:
    for path in (ROOT / top).rglob("*.py"):
        assert path.name != "utils.py"
        assert len(path.read_text().splitlines()) <= 450, f"{path}: what second thing has it learned?"
