"""The benchmarks for a GPU, tested on a CPU: figures, floors, and errors in one line.

Whole stages are rehearsed in test_bare_gpu_machine.py.
"""

import json
from pathlib import Path

import pytest
import torch

from chairlift.bench.workload import Workload
from engine.bench.__main__ import main
from engine.bench.gpu.stages import Command
from tests.support.kernels.interpreter import patch_language_once_per_launch, sum_products_in_order

_QUICK = ["--quick", "--device", "cpu", "--shape", "tiny", "--threads", "1"]


def run_quick(name: str, out: Path, *flags: str) -> dict:
    assert main([name, *_QUICK, "--out", str(out), *flags]) == 0
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["gpu-decode", "gpu-mix", "gpu-pair", "gpu-peers", "gpu-judge", "gpu-invariance"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--out", str(tmp_path)]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(errors) == 1
    assert "PyTorch sees no GPU here" in errors[0]
    assert not list(tmp_path.iterdir())


def test_cpu_needs_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-decode", "--device", "cpu"]) == 1
    assert "add --quick" in capsys.readouterr().err


def test_decode_steps_stand_beside_their_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_quick("G1", tmp_path, "--precision", "bf16")
    assert len(report["results"]) == 3
    assert "one of 20" in report["results"][2]["what"]
    assert "x the fraction of equal lengths" in report["results"][2]["note"]
    assert all("bf16" in result["what"] and result["floor"] > 0 for result in report["results"])
    assert report["machine"]["floors"] is None
    assert report["raw"]["ceilings"]["bytes_per_s"] > 0
    out = capsys.readouterr().out
    assert "fraction" in out
    assert "the figures are meaningless" in out


@pytest.mark.slow
def test_batch_invariant_bits_are_equal_and_their_cost_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_language_once_per_launch()
    sum_products_in_order(monkeypatch)
    report = run_quick("gpu-invariance", tmp_path)
    assert [result["figure"] for result in report["results"][:3]] == [100.0] * 3
    assert all("--batch-invariant over without" in result["what"] for result in report["results"][3:])
    assert set(report["raw"]["normal"]) == {"decode_step_s", "prompt_s"}


def test_cases_beyond_the_budget_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_quick("gpu-mix", tmp_path, "--budget", "0")
    assert report["results"] == []
    assert "left out, --budget was used up: 3/3, tiny bf16" in capsys.readouterr().out


def test_a_mix_has_names_for_its_cases() -> None:
    with pytest.raises(SystemExit):
        main(["gpu-mix", *_QUICK, "--cases", "sharegpt,1000"])


@pytest.mark.parametrize("stage", [["--first-contact"], ["--stage", "kernels"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_stage_begins(stage: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", *stage, "--out", str(tmp_path)]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "PyTorch sees no GPU here" in error
    assert not list(tmp_path.iterdir())


def test_a_wrong_token_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def always_one(_setting: object, _checkpoint: object, workload: Workload, _mode: str) -> list[tuple[int, ...]]:
        return [(1,) * num_tokens for num_tokens in workload.max_tokens]

    monkeypatch.setattr("engine.bench.gpu_judge._answers", always_one)
    assert main(["gpu-judge", *_QUICK, "--out", str(tmp_path)]) == 1
    assert "gpu-judge: error: in-flight: " in capsys.readouterr().err


def test_a_stage_goes_on_after_a_failure_and_reports_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {"one": "print('at first', flush=True); raise SystemExit(3)", "two": "print('all is well')"}
    commands = [Command(name, ("-c", program), reports=False) for name, program in programs.items()]
    monkeypatch.setattr("engine.bench.gpu_check.commands_of", lambda *_, **__: commands)
    assert main(["gpu-check", *_QUICK, "--out", str(tmp_path), "--first-contact"]) == 1
    shown = capsys.readouterr()
    assert "at first\n" in shown.err
    assert "error: one: failed with exit status 3" in shown.err
    assert "two: all is well" in shown.out
    (table,) = tmp_path.glob("gpu-first-contact-*.md")
    assert "- two: all is well" in table.read_text()
    assert "- Could not run: one: failed with exit status 3" in table.read_text()
    (report,) = tmp_path.glob("*.json")
    assert json.loads(report.read_text())["raw"]["log of one"] == ["at first"]


def test_stages_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", "--out", str(tmp_path)]) == 0
    assert "make gpu-check STAGE=peers" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_stage_that_cannot_run_fails_and_keeps_what_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["gpu-check", *_QUICK, "--out", str(tmp_path), "--stage", "mix", "--extra=--cases nonsense"]
    assert main(arguments) == 1
    assert "error: gpu-mix: failed with exit status 2" in capsys.readouterr().err
    assert "Could not run: gpu-mix" in next(tmp_path.glob("*.md")).read_text()


def test_a_stage_without_time_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", *_QUICK, "--out", str(tmp_path), "--stage", "mix", "--budget", "1"]) == 0
    assert "left out, --budget was used up: gpu-mix" in capsys.readouterr().out
