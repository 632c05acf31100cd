"""Signals, in the orders in which they can come."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.shutdown import ShutdownSignals, StoppedWhileLoading
from engine.startup.progress import StartupProgress


class Engine:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def drain(self, grace_s: float) -> None:
        self.told.append(f"drain {grace_s:g}")

    def stop(self) -> None:
        self.told.append("stop")


class Clock:
    """Blocks until released."""

    now_s = 100.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def signals(clock: Clock) -> Iterator[ShutdownSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ShutdownSignals(5.0, clock=lambda: clock.now_s)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_first_drains_and_the_second_stops(signals: ShutdownSignals) -> None:
    engine = Engine()
    signals.control(engine)  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert engine.told == ["drain 5", "stop"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_same_signal_is_a_second_one_after_a_second_only(
    signals: ShutdownSignals, clock: Clock, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    signals.control(engine)  # type: ignore[arg-type]
    for now_s in (100.0, 100.0, 101.0):
        clock.now_s = now_s
        os.kill(os.getpid(), number)
    assert (engine.told, caplog.messages) == (["drain 5"], [])
    clock.now_s = 101.01
    os.kill(os.getpid(), number)
    assert engine.told == ["drain 5", "stop"]
    assert caplog.messages == ["second signal: ending at once"]


def test_a_parent_that_ends_right_after_its_signal_stops_the_engine(
    signals: ShutdownSignals, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    signals.control(engine)  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGTERM)
    signals.stop()
    assert (engine.told, caplog.messages) == (["drain 5", "stop"], [])


def test_another_machine_that_is_asked_to_stop_ends_the_load(signals: ShutdownSignals) -> None:
    with pytest.raises(StoppedWhileLoading):
        signals.drain()
    with pytest.raises(StoppedWhileLoading):
        signals.control(Engine())  # type: ignore[arg-type]


def test_a_signal_that_comes_twice_while_loading_interrupts_once(signals: ShutdownSignals) -> None:
    """The interrupted code cleans up, and a second signal must not interrupt that."""
    with pytest.raises(StoppedWhileLoading):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_during_the_load_takes_effect_even_if_its_exception_is_suppressed(signals: ShutdownSignals) -> None:
    """As a callback from C does, which cannot raise."""
    with contextlib.suppress(StoppedWhileLoading):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StoppedWhileLoading):
        signals.control(Engine())  # type: ignore[arg-type]
    assert signals.ends_load, "ranks that fail by its end are not reported"


def test_an_error_of_the_load_after_a_signal_is_the_signals(signals: ShutdownSignals) -> None:
    """Python 3.11 wraps what is raised in `__set_name__` in a RuntimeError, for one."""

    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(OSError, match="of its own"), signals.loading():
        raise OSError("an error of its own")
    assert not signals.ends_load
    with pytest.raises(StoppedWhileLoading), signals.loading():
        type("Owner", (), {"field": Field()})
    assert signals.ends_load


def test_a_signal_to_a_running_engine_ends_no_load(signals: ShutdownSignals) -> None:
    signals.control(Engine())  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGTERM)
    assert not signals.ends_load


def test_a_signal_while_llvm_compiles_ends_the_load_at_its_next_progress(signals: ShutdownSignals) -> None:
    """An exception raised in a callback of LLVM is printed with a traceback and lost."""
    startup = StartupProgress(check=signals.check)
    startup.begin("kernels", "compiling")
    library: dict[str, Any] = {"__name__": "llvmlite.binding.executionengine"}
    exec("def notify(callback): callback()", library)
    library["notify"](lambda: os.kill(os.getpid(), signal.SIGTERM))
    thread = threading.Thread(target=startup.update, args=("told by another thread",))
    thread.start()
    thread.join()
    with pytest.raises(StoppedWhileLoading):
        startup.update("compiling 1 of 2")
    with pytest.raises(StoppedWhileLoading):
        startup.begin("weights", "loading weights")


def test_unreadable_standard_input_counts_as_closed(signals: ShutdownSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_fd: int, _n: int) -> bytes:
        raise OSError(5, "Input/output error")

    engine = Engine()
    signals.control(engine)  # type: ignore[arg-type]
    monkeypatch.setattr("engine.shutdown.os.read", read)
    signals._read_stdin()
    assert engine.told == ["stop"]
