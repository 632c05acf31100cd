"""`docker compose up --scale engine=2`: both are used, and the absence of one is felt by its own requests alone."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(1800)]


def token_ids(answers: list[Any]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def moved(answers: list[Any]) -> int:
    """How many felt that an engine was lost."""
    return sum(answer.finished.timing.moved.ToMicroseconds() > 0 for answer in answers)


def num_used(stack: Any, before: dict[str, float]) -> int:
    """How many engines have ended requests since then."""
    after = stack.metric("request_success_total")
    return sum(count > before.get(engine, 0.0) for engine, count in after.items())


def engine_lines(stack: Any) -> list[str]:
    """What the frontend has said of engines."""
    return [line for line in stack.log("frontend").splitlines() if "engine" in line]


@pytest.fixture(scope="module")
def undisturbed(stack: Any) -> list[list[int]]:
    """The tokens of each seed from a single engine that nothing happens to."""
    return token_ids(stack.run_streams())


def test_both_get_requests(stack: Any, undisturbed: list[list[int]]) -> None:
    stack.scale(2)
    before = stack.metric("request_success_total")
    assert token_ids(stack.run_streams()) == undisturbed
    assert num_used(stack, before) == 2


def test_killed_engine_is_felt_by_its_own_requests_alone_and_used_again_when_it_is_back(
    stack: Any, docker: Callable[..., str], undisturbed: list[list[int]]
) -> None:
    stack.scale(2)
    victim = stack.containers("engine")[1]
    lost_before = sum(stack.metric("requests_lost_engine_total").values())
    with stack.slow_engines() as speed_up:
        answers = stack.run_streams(at_token=5, act=lambda: (docker("kill", victim), speed_up()))
    assert token_ids(answers) == undisturbed
    lost = sum(stack.metric("requests_lost_engine_total").values()) - lost_before
    assert 0 < lost < len(answers)
    assert moved(answers) == lost
    assert stack.inspect("frontend")["State"]["Health"]["Status"] == "healthy"
    stack.scale(2)
    before = stack.metric("request_success_total")
    assert token_ids(stack.run_streams()) == undisturbed
    assert num_used(stack, before) == 2


def test_engine_that_is_taken_away_finishes_what_it_has(stack: Any, undisturbed: list[list[int]]) -> None:
    stack.scale(2)
    answers = stack.run_streams(at_token=50, act=lambda: stack.compose("up", "--detach", "--scale", "engine=1"))
    assert token_ids(answers) == undisturbed
    assert len(stack.containers("engine")) == 1
    stack.scale(1)
    assert token_ids(stack.run_streams()) == undisturbed


def test_engine_gives_way_to_the_one_on_a_gpu_and_is_left_alone(
    stack: Any, docker: Callable[..., str], image: Callable[[str], str], undisturbed: list[list[int]]
) -> None:
    # No GPU here: one more engine on the CPU, which has loaded when it gets the two names that engine-gpu has.
    name, network = f"{stack.name}-gpu", f"{stack.name}_backend"
    flags = ["--network", f"{stack.name}_egress"]
    flags += ["--volume", f"{stack.name}_kernels:/var/cache/chairlift/kernels"]
    flags += ["--env", "CHAIRLIFT_SERVED_MODEL_NAME=from-the-env-file"]

    def name_it() -> None:
        docker("network", "connect", "--alias", "engine-gpu", "--alias", "engine", network, name)
        stack.wait_until(lambda: "this one stands by" in stack.log("engine"), "engine")

    stack.scale(1)
    docker(
        "run",
        "--detach",
        "--rm",
        "--name",
        name,
        *flags,
        image("engine"),
        "chairlift-engine",
        "--host=0.0.0.0",
        "--insecure-bind",
    )
    try:
        stack.wait_until(lambda: " serving on " in docker("logs", name), "engine")
        assert token_ids(stack.run_streams(at_token=50, act=name_it)) == undisturbed
        stack.wait_until(lambda: list(stack.metric("engine_up").values()).count(1.0) == 1, "frontend")
        before, said = stack.metric("request_success_total"), engine_lines(stack)
        assert token_ids(stack.run_streams()) == undisturbed
        assert num_used(stack, before) == 1
        # Its address stays among those of the name: for two health checks, 10 s, nothing is logged about it.
        checks = {check["Start"] for check in stack.health("frontend")}
        stack.wait_until(lambda: len({c["Start"] for c in stack.health("frontend")} - checks) >= 2, "frontend")
        assert engine_lines(stack) == said
        assert stack.inspect("engine")["State"]["Health"]["Status"] == "healthy"
        assert stack.inspect("engine")["RestartCount"] == 0
    finally:
        docker("kill", name)
    stack.compose("restart", "engine")
    stack.scale(1)
    assert token_ids(stack.run_streams()) == undisturbed


def test_down_leaves_nothing(stack: Any, docker: Callable[..., str]) -> None:
    """The last test of the folder's last file: what comes after it would have to compile the kernels again."""
    stack.compose("--profile", "monitoring", "down", "--volumes", "--timeout", "20")
    assert docker("ps", "--all", "--quiet", *stack.filters) == ""
    assert docker("network", "ls", "--quiet", *stack.filters) == ""
    assert docker("volume", "ls", "--quiet", *stack.filters) == ""
