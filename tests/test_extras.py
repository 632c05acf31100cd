"""Installation: each extra's requirements are enough for what it promises; make says which variables do nothing."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.packages import hidden_modules, hiding, requirements

ROOT = Path(__file__).resolve().parent.parent
CHECK = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "check_extras.py")))


@pytest.mark.parametrize("extra", CHECK.PROMISES)
def test_extra_alone_imports_what_it_promises(extra: str, tmp_path: Path) -> None:
    allowed = requirements("chairlift", extra, set()) | {"setuptools", "pip"}
    hidden = hidden_modules(allowed)
    if extra != "engine":
        assert "numba" in hidden
        torch_needs_triton = extra == "transformers" and torch.version.cuda is not None
        assert ("triton" in hidden) == (not torch_needs_triton)
    assert ("torch" in hidden) == (extra not in ("engine", "transformers"))
    assert ("transformers" in hidden) == (extra != "transformers")
    done = subprocess.run(
        [sys.executable, "-c", hiding(hidden) + CHECK.IMPORT_ALL, *CHECK.PROMISES[extra]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variable", "is_said"),
    [("PORT=50061", True), ("ARGS=--port 50061", False), ("CHAIRLIFT_PORT=50061", False), ("HF_TOKEN=x", False)],
)
def test_make_says_which_variable_no_rule_reads(variable: str, is_said: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    make = ["make", "-n", "help", variable]
    done = subprocess.run(make, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert ("no rule reads PORT; flags of the server go into ARGS" in done.stderr) == is_said
    assert bool(done.stderr) == is_said


def test_make_completes_an_environment_that_ctrl_c_left_without_pip(tmp_path: Path) -> None:
    calls, half_made = tmp_path / "calls", tmp_path / "half-made"
    python = tmp_path / "python"
    (half_made / "bin").mkdir(parents=True)
    for path, text in ((python, f'echo "$@" >> {calls}'), (half_made / "bin" / "python", "exit 1")):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    make = ["make", f"{half_made}/.python", f"VENV={half_made}", f"PYTHON={python}"]
    subprocess.run(make, cwd=ROOT, capture_output=True, check=False)  # fails: this pip installs nothing
    assert f"-m venv {half_made}" in calls.read_text().splitlines()
