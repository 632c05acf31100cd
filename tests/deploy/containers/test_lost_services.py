"""Each service killed and restarted while it has streams open."""

import re
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from chairlift import GenerationError

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(1800)]
# The brackets: this shell's own command line must not match.
CRASH = "for p in /proc/[0-9]*; do grep -q 'bin/[c]hairlift-engine' $p/cmdline && kill -9 ${p#/proc/}; done; true"


@pytest.fixture(scope="module")
def undisturbed(stack: Any) -> list[list[int]]:
    """The tokens of each seed when nothing happens."""
    return [answer.token_ids for answer in stack.run_streams()]


def test_streams_go_on_in_an_engine_that_docker_starts_again(
    stack: Any, docker: Callable[..., str], undisturbed: list[list[int]]
) -> None:
    restarts = stack.inspect("engine")["RestartCount"]
    engine = stack.container("engine")
    with stack.slow_engines() as speed_up:
        answers = stack.run_streams(at_token=5, act=lambda: (docker("exec", engine, "sh", "-c", CRASH), speed_up()))
    assert [answer.token_ids for answer in answers] == undisturbed
    assert all(answer.finished.timing.moved.ToMilliseconds() > 0 for answer in answers)
    assert stack.inspect("engine")["RestartCount"] == restarts + 1
    assert "the engine was killed" in stack.log("engine")
    assert "Traceback" not in stack.log("frontend")


def test_engine_that_does_not_come_back_is_unavailable_until_it_does(stack: Any, docker: Callable[..., str]) -> None:
    lost_at_s = 0.0

    def kill_and_ask() -> None:
        nonlocal lost_at_s
        docker("kill", stack.container("engine"))  # what is killed by hand Docker does not start again
        stack.wait_until(lambda: sum(stack.metric("engine_up").values()) == 0, "frontend")
        lost_at_s = time.monotonic()
        with pytest.raises(GenerationError, match="no engine is attached") as refused:
            stack.tokens()
        assert refused.value.status is grpc.StatusCode.UNAVAILABLE

    error = stack.cut_off(kill_and_ask)
    assert error.status is grpc.StatusCode.UNAVAILABLE
    timeout_s = float(stack.settings["CHAIRLIFT_FAILOVER_TIMEOUT"])
    assert time.monotonic() - lost_at_s > timeout_s - 5  # it waited for an engine
    stack.wait("frontend", lambda state: state["Health"]["Status"] == "unhealthy")
    stack.scale(1)
    assert stack.tokens()
    assert "Traceback" not in stack.log("frontend")


def test_killed_frontend_comes_back(stack: Any, docker: Callable[..., str], undisturbed: list[list[int]]) -> None:
    error = stack.cut_off(lambda: docker("kill", stack.container("frontend")))
    assert error.status is grpc.StatusCode.UNAVAILABLE
    stack.scale(1)
    assert [answer.token_ids for answer in stack.run_streams()] == undisturbed


@pytest.mark.parametrize("service", ["engine", "frontend"])
def test_restarted_service_finishes_its_streams_and_comes_back(
    stack: Any, undisturbed: list[list[int]], service: str
) -> None:
    num_drains = _num_drains(stack, service)
    answers = stack.run_streams(at_token=50, act=lambda: stack.compose("restart", service))
    assert [answer.token_ids for answer in answers] == undisturbed
    stack.scale(1)
    assert [answer.token_ids for answer in stack.run_streams()] == undisturbed
    assert _num_drains(stack, service) == num_drains + 1


def _num_drains(stack: Any, service: str) -> int:
    return len(re.findall(r"drained:? (?:\d|no requests)", stack.log(service)))
