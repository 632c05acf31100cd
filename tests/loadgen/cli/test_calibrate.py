from pathlib import Path

import pytest

import loadgen.cli.calibrate
from loadgen.cli.main import main
from loadgen.run.ceiling import Ceiling, stored_ceiling, this_host


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ceiling:
    """What calibrating finds, without doing it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host, cpus, python = this_host()
    ceiling = Ceiling("http", 12_000.0, 9_000.0, 2, 4e5, 0.71, -0.02, 0.01, host, cpus, python, "2026-01-01")

    def calibrate(protocol: str, *, hold_s: float, say: object) -> Ceiling:
        assert (protocol, hold_s) == ("http", 2.0)
        return ceiling

    monkeypatch.setattr(loadgen.cli.calibrate, "calibrate", calibrate)
    return ceiling


def test_the_figure_is_shown_and_kept(found: Ceiling, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["calibrate", "--protocol", "http", "--hold", "2s"]) == 0
    said = capsys.readouterr().out
    assert "12000 messages/s with 2 workers, 9000 with one" in said
    assert "TTFT +0.71 ms, ITL -0.020 ms, TPOT +0.010 ms" in said
    assert str(tmp_path) in said
    assert stored_ceiling("completions") == found


def test_it_can_be_looked_at_without_being_kept(found: Ceiling, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--protocol", "http", "--hold", "2s", "--no-keep"]) == 0
    said = capsys.readouterr().out
    assert "figures are not kept" in said
    assert "12000 messages/s" in said
    assert stored_ceiling("completions") is None


def test_a_dry_run_says_what_would_be_done_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delattr(loadgen.cli.calibrate, "calibrate")
    assert main(["calibrate", "--dry-run"]) == 0
    assert f"kept in {tmp_path / 'chairlift' / 'loadgen-ceiling.json'}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
