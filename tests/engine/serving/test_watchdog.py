"""An engine whose step loop stands still ends, with a line that says where."""

import itertools
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import DeviceError
from engine.serving.watchdog import Watchdog
from tests.hang import HANG_S
from tests.support.engine.process import run_main

MAIN = """
import sys
import threading

import engine.startup.build
from engine.__main__ import main
from engine.core.request import Request, RequestId, SamplingParams
from tests.support.engine.fake_engine import fake_engine_parts


def hang(plan):
    threading.Event().wait()


def build_engine(*_):
    parts = fake_engine_parts(on_step=hang)
    parts.scheduler.add_request(Request(RequestId(1), (5, 6), SamplingParams(seed=0, max_tokens=3), arrival_s=0.0))
    return parts


engine.startup.build.build_engine = build_engine
sys.exit(main(["--uds", sys.argv[1], "--log-level", "warning", "--step-timeout", "1"]))
"""


def watched(turns: Iterator[int], timeout_s: float, wait_for: Callable[[threading.Event], object]) -> list[DeviceError]:
    """What a watchdog says of a loop that has made so many turns at each look, and goes on turning after that."""
    said: list[DeviceError] = []
    afterwards = itertools.count(-1, -1)
    over = threading.Event()

    def on_hang(error: DeviceError) -> None:
        said.append(error)
        over.set()

    def look() -> int:
        num_turns = next(turns, None)
        if num_turns is None:
            over.set()
            return next(afterwards)
        return num_turns

    with Watchdog(look, timeout_s, on_hang, thread_id=threading.get_ident(), check_interval_s=0.001):
        wait_for(over)
    return said


def test_a_loop_that_stands_still_is_told_after_the_timeout_counted_in_looks() -> None:
    num_looks = itertools.count()
    turns = (min(next(num_looks), 7) for _ in itertools.count())
    said = watched(turns, 0.02, lambda over: over.wait(HANG_S))
    assert len(said) == 1
    assert next(num_looks) == 8 + 20  # 0 to 7, then as many as the timeout has


def turns_until_it_stands(thread_id: int) -> Iterator[int]:
    """Turns go on until the thread waits for an event in one of the lambdas here, which it then does to the end."""
    for turn in itertools.count():
        stack = traceback.walk_stack(sys._current_frames()[thread_id])
        innermost, *callers = [frame.f_code.co_name for frame, _ in stack]
        yield -1 if innermost == "wait" and "<lambda>" in callers else turn


def test_it_says_where_the_loop_stands() -> None:
    (error,) = watched(turns_until_it_stands(threading.get_ident()), 0.01, lambda over: over.wait(HANG_S))
    assert re.fullmatch(
        r"the step loop has made no progress for 0\.01 s, in .*: the device hangs, or a step takes longer than "
        r"--step-timeout allows",
        str(error),
    )
    assert "threading.wait" in str(error)


def test_a_loop_that_turns_at_every_second_look_is_left_alone() -> None:
    turns = iter([look // 2 for look in range(200)])
    assert watched(turns, 0.002, lambda over: over.wait(HANG_S)) == []


def test_without_a_timeout_nobody_looks() -> None:
    turns = iter([1])
    assert watched(turns, 0.0, lambda over: None) == []
    assert next(turns) == 1


def test_a_step_that_hangs_ends_the_process_with_one_line(tmp_path: Path) -> None:
    result = run_main(MAIN, tmp_path)
    assert result.returncode == 1
    assert re.fullmatch(
        r"chairlift-engine: error: the step loop has made no progress for 1 s, in engine\.step_loop\.\w+ \(line \d+\), "
        r"which is in threading\.wait: .*--step-timeout allows\n",
        result.stderr,
    ), result.stderr


SPINNING = """
import dataclasses
import sys

import engine.__main__
import engine.startup.build
from engine.core.request import Request, RequestId, SamplingParams
from tests.support.engine.fake_engine import fake_engine_parts


def spin(plan):
    while True:
        pass


def build_engine(*_):
    parts = dataclasses.replace(fake_engine_parts(on_step=spin), progress=lambda: 0)
    parts.scheduler.add_request(Request(RequestId(1), (5, 6), SamplingParams(seed=0, max_tokens=3), arrival_s=0.0))
    return parts


engine.startup.build.build_engine = build_engine
engine.__main__.STALL_TIMEOUT_S = 1.0
sys.exit(engine.__main__.main(["--uds", sys.argv[1], "--log-level", "warning"]))
"""


def test_a_step_that_spins_ends_the_process_long_before_the_step_timeout(tmp_path: Path) -> None:
    result = run_main(SPINNING, tmp_path)
    assert result.returncode == 1
    assert re.fullmatch(
        r"chairlift-engine: error: the step loop has made no progress for 1 s, in engine\.step_loop\.\w+ \(line \d+\), "
        r"which is in __main__\.spin: within a step nothing is done any more\n",
        result.stderr,
    ), result.stderr
