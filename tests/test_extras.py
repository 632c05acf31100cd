"""Each extra's requirements are enough for what it promises: everything else is hidden, the imports still work."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Hides every installed distribution but the allowed ones from the import system; the importer of .ci/check_extras.py
# follows.
HIDE = """
import sys
from importlib.machinery import PathFinder
hidden = set(sys.argv[1].split(","))
find_spec = PathFinder.find_spec
def find_visible(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find_spec(name, path, target)
PathFinder.find_spec = staticmethod(find_visible)
sys.argv[1:] = sys.argv[2:]
"""


def load_check_extras() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_extras", ROOT / ".ci" / "check_extras.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = load_check_extras()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(name: str, extra: str, seen: set[str]) -> set[str]:
    """Distributions that installing `name[extra]` brings, itself included."""
    if name in seen:
        return seen
    seen.add(name)
    try:
        declared = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return seen
    for line in declared:
        requirement, _, marker = line.partition(";")
        wanted = f'extra == "{extra}"' in marker.replace("'", '"') if "extra" in marker else True
        if wanted:
            match = re.match(r"[A-Za-z0-9._-]+", requirement)
            assert match is not None
            requirements(normal(match.group()), "", seen)
    return seen


@pytest.mark.parametrize("extra", CHECK.PROMISES)
def test_extra_alone_imports_what_it_promises(extra: str, tmp_path: Path) -> None:
    allowed = requirements("chairlift", extra, set()) | {"setuptools", "pip"}
    modules = importlib.metadata.packages_distributions()
    hidden = {module for module, owners in modules.items() if not {normal(owner) for owner in owners} & allowed} - {
        "_distutils_hack"
    }
    if extra != "engine":
        assert {"torch", "triton", "numba"} <= hidden
    done = subprocess.run(
        [sys.executable, "-c", HIDE + CHECK.IMPORT_ALL, ",".join(sorted(hidden)), *CHECK.PROMISES[extra]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
