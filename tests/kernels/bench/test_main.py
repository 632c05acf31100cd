"""`python -m kernels.bench`: its report on a CPU, its exit statuses and its messages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.bench.__main__ import main


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process, as --device must select Triton's interpreter before Triton is imported."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.bench", *flags]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["decode,mixed", "prefill,sampler", "linear,pointwise,delta", "latent"])
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
    uneven = [result for result in report["results"] if "one of" in result["what"]]
    assert all("x the fraction of equal lengths" in result["note"] for result in uneven)
    assert bool(uneven) == (groups == "decode,mixed")
    assert report["device"]["versions"]["torch"]
    assert out.with_suffix(".md").read_text().count("\n") == len(report["results"]) + 2
    assert sum("result" in json.loads(line) for line in journal.read_text().splitlines()) == len(report["results"])
    assert "the figures are meaningless" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_one_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert capsys.readouterr().err.startswith("kernels.bench: error: PyTorch sees no GPU here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is imported without its interpreter")
def test_without_budget_every_case_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--only", "linear", "--budget", "1"]) == 0
    assert "left out, --budget 1 s was used up: linear qkv" in capsys.readouterr().out


def test_unknown_group_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "linear,nonsense"]) == 2
    assert "--only nonsense: must be one of decode, prefill" in capsys.readouterr().err
