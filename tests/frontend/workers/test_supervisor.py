"""Tests of `Supervisor`, with shell scripts as workers."""

import asyncio
import errno
import logging
import os
import signal

import pytest

from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from frontend.workers.child_process import RestartPauses, describe_end
from frontend.workers.supervisor import Supervisor, WorkerFailed
from tests.hang import HANG_S

LISTENING = '{"news": "listening", "reason": "", "num_drained": 0}'


def supervisor(script, num_workers=2):
    config = FrontendConfig(port=0, http_port=0, workers=num_workers)
    return Supervisor(config, ("/bin/sh", "-c", script), first_pause_s=0.01)


def test_pauses_double_up_to_30_s_and_are_reset_after_a_minute_without_failure():
    pauses = RestartPauses(0.5)
    assert [pauses.next_s(0.1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert pauses.next_s(59.9) == 30
    assert [pauses.next_s(60.0), pauses.next_s(1.0)] == [0.5, 1]


@pytest.mark.parametrize(("status", "words"), [(3, "exit status 3"), (-9, "killed by SIGKILL"), (-40, "signal 40")])
def test_return_code_is_described_in_words(status, words):
    assert words in describe_end(status)


async def test_start_fails_and_removes_its_files_if_workers_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workers = supervisor("exit 3")
    with pytest.raises(WorkerFailed, match=r"worker [01] ended before it listened: exit status 3"):
        await workers.start()
    await workers.stop()
    assert list(tmp_path.iterdir()) == []


async def test_start_fails_if_one_worker_cannot_start(tmp_path):
    script = f"mkdir {tmp_path}/once 2>/dev/null || exit 7; echo '{LISTENING}'; exec sleep 100"
    workers = supervisor(script)
    with pytest.raises(WorkerFailed, match="exit status 7"):
        await workers.start()
    await workers.stop()


async def test_configuration_error_of_a_worker_is_raised():
    workers = supervisor("""echo '{"news": "misconfigured", "reason": "--this is wrong", "num_drained": 0}'; exit 2""")
    with pytest.raises(ConfigError, match=r"^--this is wrong$"):
        await workers.start()
    await workers.stop()


async def test_worker_that_dies_repeatedly_is_replaced_with_growing_pauses(caplog):
    caplog.set_level(logging.WARNING, logger="frontend.workers.supervisor")
    workers = supervisor(f"echo '{LISTENING}'; exit 3", num_workers=1)
    await workers.start()
    async with asyncio.timeout(HANG_S):
        while len(caplog.messages) < 4:
            await asyncio.sleep(0.01)
    await workers.stop()
    assert caplog.messages[:4] == [
        f"worker 0 ended: exit status 3; replacing it in {pause} s" for pause in ("0.01", "0.02", "0.04", "0.08")
    ]


async def test_worker_serves_even_if_its_pid_cannot_be_noted_for_metrics(monkeypatch, caplog):
    started = []

    def note_pid(folder, index, pid):
        started.append(pid)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("frontend.workers.supervisor.note_pid", note_pid)
    workers = supervisor(f"echo '{LISTENING}'; exec sleep 100", num_workers=1)
    await workers.start()
    os.kill(started[0], signal.SIGKILL)
    async with asyncio.timeout(HANG_S):
        while len(started) < 2:
            await asyncio.sleep(0.01)
    assert await workers.drain(0) == 0, "the replacement is missing"
    assert "missing in process_* metrics: [Errno 28]" in caplog.text
    assert "cannot be started" not in caplog.text
    await workers.stop()


async def test_all_workers_end_after_a_defect_of_the_supervisor(monkeypatch, caplog):
    workers = supervisor(f"echo '{LISTENING}'; exec sleep 100")
    await workers.start()
    failed = asyncio.Event()

    def fail(*_):
        failed.set()
        raise PermissionError("the folder is read-only")

    monkeypatch.setattr("frontend.workers.supervisor.clear_gauges", fail)
    workers._workers[0].kill()
    await asyncio.wait_for(failed.wait(), HANG_S)
    assert await workers.drain(HANG_S) == 0
    await workers.stop()
    assert [worker.status for worker in workers._workers.values()] == [-9, -15]
    assert caplog.text.count("a worker is not replaced any more") == 1


async def test_worker_that_ignores_sigterm_is_killed_after_the_grace_period():
    workers = supervisor(f"trap '' TERM; echo '{LISTENING}'; while :; do sleep 0.1; done")
    await workers.start()
    assert await workers.drain(-4.9) == 0  # 0.1 s in all: a worker may take 5 s longer than its grace period
    await workers.stop()
    assert [worker.status for worker in workers._workers.values()] == [-9, -9]


async def test_drain_returns_the_sum_of_the_reported_counts():
    finish = """finish() { echo '{"news": "drained", "reason": "", "num_drained": 21}'; exit 0; }"""
    workers = supervisor(f"{finish}; trap finish TERM; echo '{LISTENING}'; while :; do sleep 0.01; done")
    await workers.start()
    assert await workers.drain(HANG_S) == 42
    await workers.stop()
