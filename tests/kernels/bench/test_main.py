"""`python -m kernels.bench` rehearsed: in a process of its own, as Triton's interpreter must be chosen before Triton is
imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.bench", *flags]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["decode,mixed", "prefill,sampler", "linear,pointwise"])
def test_every_case_is_right_and_beside_its_floor(groups: str, tmp_path: Path) -> None:
    out, journal = tmp_path / "out" / "kernels.json", tmp_path / "journal.jsonl"
    done = run("--device", "cpu", "--only", groups, "--out", str(out), "--journal", str(journal))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["problems"] == report["left_out"] == []
    assert len(report["results"]) > 3
    for result in report["results"]:
        assert result["figure"] > 0
        assert result["floor"] > 0
        assert len(report["raw"][result["what"]]["seconds"]) >= 3
    assert report["device"]["versions"]["torch"]
    assert out.with_suffix(".md").read_text().count("\n") == len(report["results"]) + 2
    assert sum("result" in json.loads(line) for line in journal.read_text().splitlines()) == len(report["results"])
    assert "the figures are meaningless" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    done = run()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kernels.bench: error: PyTorch sees no GPU here")


def test_without_budget_every_case_is_left_out() -> None:
    done = run("--device", "cpu", "--only", "linear", "--budget", "1")
    assert done.returncode == 0, done.stderr
    assert "left out, --budget 1 s was used up: linear qkv" in done.stdout


def test_an_unknown_group_is_a_wrong_flag() -> None:
    done = run("--device", "cpu", "--only", "linear,nonsense")
    assert done.returncode == 2
    assert "--only nonsense: must be one of decode, prefill" in done.stderr
