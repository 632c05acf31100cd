"""Followers as processes: every end of one is detected, reported once, and leaves no process behind.

The programs here implement a follower's side of the protocol and nothing else.
"""

import errno
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.errors import CheckpointError, ConfigError, EngineError, StepError
from engine.parallel.followers import Followers
from tests.hang import HANG_S

RUN_UNTIL_EOF = """
    channel.send(None)
    try:
        while True:
            channel.recv_bytes()
    except EOFError:
        pass
"""


class Group:
    """Fake group of rank 0, which never joins."""

    has_left = False

    def leave(self) -> None:
        self.has_left = True


class Started:
    """Followers and their reported failures."""

    def __init__(self, body: str, size: int, timeout_s: float) -> None:
        program = f"""
import os, signal, sys, threading, time
from multiprocessing.connection import Connection
from engine.errors import CheckpointError, ConfigError, StepError
def watch():
    while os.read(0, 1):
        pass
    os._exit(0)
threading.Thread(target=watch, daemon=True).start()
channel = Connection(int(sys.argv[-1]))
rank = channel.recv()
{textwrap.dedent(body)}
"""
        self.failures: queue.Queue[EngineError] = queue.Queue()
        self.group = Group()
        self.followers = Followers(
            range(1, size),
            timeout_s=timeout_s,
            on_failure=self.failures.put,
            leave=self.group.leave,
            command=[sys.executable, "-c", program],
        )
        self.followers.assign(list(range(1, size)))

    def failure(self) -> EngineError:
        return self.failures.get(timeout=HANG_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """start(program, size=2, timeout_s=HANG_S) -> Started; closed at the end."""
    started: list[Started] = []

    def make(body: str, size: int = 2, timeout_s: float = HANG_S) -> Started:
        started.append(Started(body, size, timeout_s))
        return started[-1]

    yield make
    for each in started:
        each.followers.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_followers_are_ready_together_and_end_with_close(start: Callable[..., Started]) -> None:
    started = start(RUN_UNTIL_EOF, size=3)
    started.followers.wait_ready()
    pids = started.followers.pids
    assert all(map(is_alive, pids))
    folder = started.followers.meeting_folder
    assert folder.stat().st_mode & 0o777 == 0o700
    started.followers.close()
    assert not any(map(is_alive, pids))
    assert not folder.exists()
    assert started.group.has_left
    assert started.failures.empty()


def test_a_killed_follower_is_reported_by_name_once(start: Callable[..., Started]) -> None:
    started = start(RUN_UNTIL_EOF, size=3)
    started.followers.wait_ready()
    victim = started.followers.pids[1]
    os.kill(victim, signal.SIGKILL)
    error = started.failure()
    assert isinstance(error, StepError)
    assert str(error) == f"rank 2 (process {victim}) was killed by SIGKILL"
    started.followers.close()
    assert started.failures.empty()


def test_an_exit_status_is_reported(start: Callable[..., Started]) -> None:
    started = start("channel.close(); sys.exit(3)")
    assert "ended with exit status 3" in str(started.failure())


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, StepError])
def test_an_error_of_a_follower_keeps_its_class_and_gets_its_rank(
    start: Callable[..., Started], kind: type[EngineError]
) -> None:
    started = start(f"channel.send({kind.__name__}('no room for it'))")
    error = started.failure()
    assert type(error) is kind
    assert str(error) == f"rank 1 (process {started.followers.pids[0]}): no room for it"


def test_an_internal_error_of_a_follower_brings_its_traceback() -> None:
    """For rank 0 to log, unless it is a consequence of something else."""
    failures: queue.Queue[EngineError] = queue.Queue()
    program = "from engine.startup import follower; follower._follow = lambda _: [][7]; follower.main()"
    command = [sys.executable, "-c", program]
    followers = Followers([1], timeout_s=HANG_S, on_failure=failures.put, command=command)
    try:
        error = failures.get(timeout=HANG_S)
    finally:
        followers.close()
    assert str(error).endswith("IndexError: list index out of range")
    (note,) = error.__notes__
    assert "Traceback" in note
    assert "line 1, in <lambda>" in note


def test_a_follower_that_hangs_in_a_step_is_a_failure(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.parallel.followers._TICK_S", 0.02)
    started = start(RUN_UNTIL_EOF, timeout_s=0.05)
    started.followers.wait_ready()
    with started.followers.waiting_for("step 17"):
        error = started.failure()
    assert "rank 0 has waited more than 0.05 s for step 17: rank 1 (process" in str(error)


def test_a_machine_without_rank_0_loads_as_long_as_it_takes(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_TICK_S", 0.02), ("START_TIMEOUT_S", 0.05)):
        monkeypatch.setattr(f"engine.parallel.followers.{name}", seconds)
    started = start(f"\n    time.sleep(0.4){RUN_UNTIL_EOF}", timeout_s=HANG_S)
    started.followers._timeout_s = 0.05
    started.followers.wait_ready(is_timed=False)
    assert started.failures.empty()


def test_idleness_is_no_failure(start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.followers._TICK_S", 0.02)
    started = start(RUN_UNTIL_EOF, timeout_s=0.05)
    started.followers.wait_ready()
    with pytest.raises(queue.Empty):
        started.failures.get(timeout=0.2)  # ten checks of the timeout


def test_an_error_of_a_collective_waits_for_the_report_of_its_cause(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective fails as soon as a peer has ended; the end of the peer is the error to report."""
    monkeypatch.setattr("engine.parallel.followers.SETTLE_S", HANG_S)
    started = start(RUN_UNTIL_EOF)
    started.followers.wait_ready()

    def step() -> None:
        with started.followers.waiting_for("step 1"):
            os.kill(started.followers.pids[0], signal.SIGKILL)
            raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError):
        step()
    assert "was killed by SIGKILL" in str(started.failures.get_nowait())


def test_a_follower_that_ignores_the_end_is_killed(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.parallel.followers._STOP_GRACE_S", 0.2)
    started = start("channel.send(None); time.sleep(1000)")
    started.followers.wait_ready()
    started.followers.close()
    assert not any(map(is_alive, started.followers.pids))


def test_nothing_is_reported_after_close(start: Callable[..., Started]) -> None:
    started = start("channel.send(None); channel.recv_bytes()")  # ends with an error when the channel does
    started.followers.wait_ready()
    started.followers.close()
    started.followers.close()
    assert started.failures.empty()


def test_a_process_that_cannot_be_started_is_one_error_and_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = subprocess.Popen, list[Any]()

    def second_fails(*args: Any, **options: Any) -> Any:
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(start(*args, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=r"the process of rank 2 cannot be started: .*temporarily unavailable"):
        Followers(range(1, 4), timeout_s=HANG_S, on_failure=lambda error: None, command=command)
    assert not is_alive(started[0].pid)
    assert threading.active_count() == num_threads
