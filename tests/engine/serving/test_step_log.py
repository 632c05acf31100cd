"""What the step log does when writing fails."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from engine.core.outputs import SchedulerOutput, SchedulerStats
from engine.errors import ConfigError
from engine.interfaces import LoopSnapshot, StepTimes
from engine.serving.step_log import StepLog
from tests.hang import HANG_S

PLAN = SchedulerOutput(1, (), (), (), 0)
SNAPSHOT = LoopSnapshot(1, 1, SchedulerStats(0, 0, 0, 4, 4, 0, 0, 0, 0, 0))
TIMES = StepTimes(0, 1000, 5000, 6000)


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--step-log .*missing/x: No such file"):
        StepLog(tmp_path / "missing" / "x")


def test_lines_that_exceed_the_queue_are_counted_and_do_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.serving.step_log.MAX_QUEUED_STEPS", 2)
    writing, release = threading.Event(), threading.Event()
    line_of = StepLog._line

    def slow_line(log: StepLog, step: object) -> str:
        writing.set()
        assert release.wait(HANG_S)
        return line_of(log, step)  # type: ignore[arg-type]

    monkeypatch.setattr(StepLog, "_line", slow_line)
    log = StepLog(tmp_path / "steps")
    log.write(PLAN, (), SNAPSHOT, TIMES)
    assert writing.wait(HANG_S)
    for _ in range(5):
        log.write(PLAN, (), SNAPSHOT, TIMES)
    release.set()
    log.close()
    lines = (tmp_path / "steps").read_text().splitlines()
    assert len(lines) == 3
    assert '"dropped":3' in lines[0]


def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(Path("/dev/full"))
    for _ in range(5):
        log.write(PLAN, (), SNAPSHOT, TIMES)
    log.close()
    assert "step log stopped: No space left on device" in caplog.text


@pytest.mark.parametrize("is_queue_full", [False, True])
def test_a_stuck_disk_does_not_keep_the_engine_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_queue_full: bool
) -> None:
    """A pipe that nobody reads is one."""
    monkeypatch.setattr("engine.serving.step_log.MAX_QUEUED_STEPS", 4)
    monkeypatch.setattr("engine.serving.step_log.CLOSE_TIMEOUT_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1)  # the smallest is a page
    writing, write = threading.Event(), StepLog._try_to_write

    def watched_write(log: StepLog, line: str) -> bool:
        writing.set()
        return write(log, "x" * (1 << 20))

    monkeypatch.setattr(StepLog, "_try_to_write", watched_write)
    log = StepLog(tmp_path / "pipe")
    log.write(PLAN, (), SNAPSHOT, TIMES)
    assert writing.wait(HANG_S)
    for _ in range(5 * is_queue_full):
        log.write(PLAN, (), SNAPSHOT, TIMES)
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(HANG_S)
    has_ended = not closing.is_alive()
    os.close(reader)  # ends the write
    assert has_ended
    assert "step log lost its last lines: they were not written within 0.1 s" in caplog.text


def test_times_are_in_whole_microseconds() -> None:
    assert (TIMES.step_us, TIMES.execute_us) == (6, 4)
