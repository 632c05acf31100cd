"""Too few threads or files: one line instead of a crash in a C library."""

import resource
import threading

import pytest

from frontend.errors import ConfigError
from frontend.process_limits import check_process_limits


def test_what_this_machine_allows_is_enough_and_nothing_is_left_running() -> None:
    before = threading.active_count()
    check_process_limits()
    assert threading.active_count() == before


def test_too_few_files_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 4096))
    with pytest.raises(ConfigError, match=r"may open 40 files, it needs 64: raise the limit \(ulimit -n\)"):
        check_process_limits()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    check_process_limits()


def test_too_few_threads_are_said_and_those_that_started_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_some(thread: threading.Thread) -> None:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(ConfigError, match=r"may start 5 more threads, it needs 24: .*pids limit"):
        check_process_limits()
    assert threading.active_count() == before
