"""Too few threads or files: one line instead of a crash in a C library."""

import os
import re
import resource
import subprocess
import sys
import threading

import pytest

from chairlift.service.process_limits import (
    MOST_FILES,
    NUM_THREADS,
    ProcessLimitError,
    check_process_limits,
    raise_file_limit,
)


class Threads:
    """Those that the test's own thread starts; of others, that come and go as they like, nothing is known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[threading.Thread] = []
        self.most_allowed = 1000
        self._start = threading.Thread.start
        self._owner = threading.current_thread()
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self.start(thread))

    def start(self, thread: threading.Thread) -> None:
        if threading.current_thread() is self._owner:
            if len(self.started) == self.most_allowed:
                raise RuntimeError("can't start new thread")
            self.started.append(thread)
        self._start(thread)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def test_what_this_machine_allows_is_enough_and_nothing_is_left_running(threads: Threads) -> None:
    check_process_limits()
    assert len(threads.started) == NUM_THREADS
    assert not any(thread.is_alive() for thread in threads.started)


def test_too_few_files_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 4096))
    with pytest.raises(ProcessLimitError, match=r"may open 40 files, it needs 64: raise the limit \(ulimit -n\)"):
        check_process_limits()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    check_process_limits()


def test_address_space_that_threads_need_is_named_if_it_is_limited() -> None:
    code = (
        "import resource, threading; from chairlift.service.process_limits import check_process_limits;"
        "threading.stack_size(8 << 20); resource.setrlimit(resource.RLIMIT_AS, (64 << 20,) * 2); check_process_limits()"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"may start \d+ more threads, it needs 24: raise the limit \(ulimit -v for", process.stderr)


def test_too_few_threads_are_said_and_those_that_started_have_ended(threads: Threads) -> None:
    threads.most_allowed = 5
    with pytest.raises(ProcessLimitError, match=r"may start 5 more threads, it needs 24: .*pids limit"):
        check_process_limits()
    assert len(threads.started) == 5
    assert not any(thread.is_alive() for thread in threads.started)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (MOST_FILES, 1 << 30)),
        ((256, resource.RLIM_INFINITY), (MOST_FILES, resource.RLIM_INFINITY)),
        ((1 << 20, 1 << 20), None),
        ((resource.RLIM_INFINITY,) * 2, None),
    ],
)
def test_a_server_may_open_as_many_files_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    raise_file_limit()
    assert limits == ([] if after is None else [after])


def test_a_limit_that_cannot_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, new: tuple[int, int]) -> None:
        raise ValueError(f"current limit exceeds maximum limit: {new}")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_file_limit()
