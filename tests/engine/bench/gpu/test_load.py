"""The load generator as a process: what it is asked, and what is read of its results."""

from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.floor import Length
from engine.bench.gpu.load import LoadResult, run_load
from tests.hang import HANG_S

LENGTHS = [Length(8, 4)] * 12


def test_a_run_without_a_server_yields_its_figures(tmp_path: Path) -> None:
    flags = ["--concurrency", "3", "--vocab-size", "100", "--goodput", "ttft:3600000", "tpot:3600000"]
    result = run_load("null:", LENGTHS, tmp_path / "run", flags, timeout_s=HANG_S)
    assert result.document["completed"] == 12
    assert result.latency_ms("ttft", "p99") >= 0
    assert result.requests_per_s > 0
    assert result.attainment == 1
    assert result.verdict.split(":")[0] in ("VALID", "DEGRADED", "INVALID")


def test_a_failure_shows_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)status 2:\n.*--target nowhere:"):
        run_load("nowhere:", LENGTHS, tmp_path / "run", [], timeout_s=HANG_S)


def test_one_that_is_too_slow_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="has not ended after"):
        run_load("null:", LENGTHS, tmp_path / "run", ["--request-rate", "1"], timeout_s=0.2)


def test_an_invalid_run_is_known() -> None:
    result = LoadResult({"verdict": {"level": "INVALID", "reasons": ["late: p99 200 ms", "more"]}})
    assert not result.is_valid
    assert result.verdict == "INVALID: late: p99 200 ms"
