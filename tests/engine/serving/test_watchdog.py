"""An engine whose step loop hangs exits, with one line that says where it hangs."""

import itertools
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import DeviceError
from engine.serving.watchdog import Watchdog
from tests.hang import HANG_S
from tests.support.engine.process import run_fake_engine

BUILD_HANGING = """
import engine.__main__
from engine.serving.watchdog import Watchdog

Watchdog.__init__.__kwdefaults__["check_interval_s"] = 0.02
engine.__main__.STALL_TIMEOUT_S = {stall_timeout_s}
progress, hangs = itertools.count(), threading.Event()  # the loop makes progress until it hangs


def hang(plan):
    hangs.set()
    {hang}


def build_parts():
    parts = replace(fake_engine_parts(on_step=hang), progress=lambda: 0 if hangs.is_set() else next(progress))
    parts.scheduler.add_request(Request(RequestId(1), (5, 6), SamplingParams(seed=0, max_tokens=3), arrival_s=0.0))
    return parts
"""


def watched(turns: Iterator[int], timeout_s: float, wait_for: Callable[[threading.Event], object]) -> list[DeviceError]:
    """Returns the errors of a watchdog whose checks see these numbers of turns, and after them a running loop."""
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


def test_a_hanging_loop_is_reported_after_the_timeout_counted_in_checks() -> None:
    num_looks = itertools.count()
    turns = (min(next(num_looks), 7) for _ in itertools.count())
    said = watched(turns, 0.02, lambda over: over.wait(HANG_S))
    assert len(said) == 1
    assert next(num_looks) == 8 + 20  # 0 to 7, then as many as the timeout has


def turns_until_it_hangs(thread_id: int) -> Iterator[int]:
    """Yields changing values until the thread waits for an event in one of the lambdas here, then -1."""
    for turn in itertools.count():
        stack = traceback.walk_stack(sys._current_frames()[thread_id])
        innermost, *callers = [frame.f_code.co_name for frame, _ in stack]
        yield -1 if innermost == "wait" and "<lambda>" in callers else turn


def test_the_error_names_the_place_of_the_hang() -> None:
    (error,) = watched(turns_until_it_hangs(threading.get_ident()), 0.01, lambda over: over.wait(HANG_S))
    assert re.fullmatch(
        r"the step loop has made no progress for 0\.01 s, in .*: the device hangs, or a step takes longer than "
        r"--step-timeout allows",
        str(error),
    )
    assert "threading.wait" in str(error)


def test_a_loop_that_turns_between_every_second_check_is_not_reported() -> None:
    turns = iter([look // 2 for look in range(200)])
    assert watched(turns, 0.002, lambda over: over.wait(HANG_S)) == []


def test_a_timeout_of_zero_disables_the_watchdog() -> None:
    turns = iter([1])
    assert watched(turns, 0.0, lambda over: None) == []
    assert next(turns) == 1


@pytest.mark.parametrize(
    ("hang", "stall_timeout_s", "step_timeout_s", "place", "reason"),
    [
        (
            "threading.Event().wait()",
            30.0,
            0.1,
            r"engine\.step_loop\.\w+ \(line \d+\), which is in threading\.wait",
            "the device hangs, or a step takes longer than --step-timeout allows",
        ),
        (
            "while True: pass",
            0.1,
            300.0,
            r"engine\.step_loop\.\w+ \(line \d+\), which is in __main__\.hang",
            "within a step nothing is done any more",
        ),
    ],
    ids=["hangs", "spins long before the step timeout"],
)
def test_a_step_that_hangs_ends_the_process_with_one_line(
    tmp_path: Path, hang: str, stall_timeout_s: float, step_timeout_s: float, place: str, reason: str
) -> None:
    code = BUILD_HANGING.format(hang=hang, stall_timeout_s=stall_timeout_s)
    result = run_fake_engine(code, tmp_path, "--step-timeout", step_timeout_s)
    assert result.returncode == 1
    line = rf"chairlift-engine: error: the step loop has made no progress for 0\.1 s, in {place}: {reason}\n"
    assert re.fullmatch(line, result.stderr), result.stderr
