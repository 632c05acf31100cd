"""Runs of different workloads, or run differently, are refused, and the field is named."""

from dataclasses import replace

import numpy as np
import pytest

from chairlift.service.service_classes import ServiceClass
from loadgen.checks.finding import yes_or_no
from loadgen.checks.selfcheck import Verdict
from loadgen.comparison.comparable import Side, check_comparable
from loadgen.errors import ComparisonError
from loadgen.record import RunData
from loadgen.service_mix import ServiceMix
from loadgen.trace.schema import Blocks
from tests.support.loadgen.runs import synthetic_run

VALID = Verdict("VALID", ())
INVALID = Verdict("INVALID", (yes_or_no("errors", "failed requests", "INVALID", "7 % failed: look at the server"),))


def side(label: str, *runs: RunData, verdict: Verdict = VALID) -> Side:
    return Side(label, runs, (verdict,) * len(runs))


def run(**changes: object) -> RunData:
    """A run of 40 requests with shared blocks; columns of its workload may be changed."""
    made = synthetic_run(40, noise_seed=1, shared_block_tokens=16)
    return replace(made, workload=replace(made.workload, **changes))


def changed(column: str, index: int, by: float) -> RunData:
    values = getattr(run().workload, column).copy()
    values[index] += by
    return run(**{column: values})


def test_equal_workloads_can_be_compared() -> None:
    assert (
        check_comparable([side("a", synthetic_run(40, noise_seed=1)), side("b", synthetic_run(40, noise_seed=2))]) == ()
    )


def test_a_name_or_a_salt_of_its_own_is_no_difference() -> None:
    other = replace(run(name="another file"), settings={**run().settings, "salt": "x", "target": "grpc://elsewhere:1"})
    assert check_comparable([side("a", run()), side("b", other)]) == ()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            changed("arrival_s", 7, 0.5),
            r"arrival_s differs in 1 of 40 requests, first in request 7: \S+ and \S+ \(a, b\)",
        ),
        (changed("input_tokens", 3, 1), r"input_tokens differs in 1 of 40 requests, first in request 3"),
        (changed("output_tokens", 0, 5), r"output_tokens differs in 1 of 40 requests, first in request 0"),
        (run(blocks=None), "blocks differ: only one of them says what prompts share"),
    ],
    ids=["schedule", "prompts", "answers", "blocks"],
)
def test_the_field_that_differs_is_named(other: RunData, text: str) -> None:
    with pytest.raises(ComparisonError, match=text):
        check_comparable([side("a", run()), side("b", other)])


def test_blocks_that_differ_are_named() -> None:
    blocks = run().workload.blocks
    assert blocks is not None
    ids = blocks.ids.copy()
    ids[blocks.offsets[5]] += 1000
    with pytest.raises(ComparisonError, match="blocks differ in 1 of 40 requests, first in request 5"):
        check_comparable([side("a", run()), side("b", run(blocks=replace(blocks, ids=ids)))])
    with pytest.raises(ComparisonError, match="block_tokens differs: 16 and 32"):
        check_comparable([side("a", run()), side("b", run(blocks=Blocks(blocks.ids, blocks.offsets, 32)))])


def test_a_schedule_that_differs_by_less_than_a_microsecond_is_the_same() -> None:
    assert check_comparable([side("a", run()), side("b", run(arrival_s=np.round(run().workload.arrival_s, 9)))]) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("closed_loop", True),
        ("concurrency", 8),
        ("max_concurrency", 4),
        ("ignore_eos", False),
        ("cancel_rate", 0.1),
        ("timeout_s", 5.0),
        ("max_retries", 2),
    ],
)
def test_a_load_that_was_run_differently_is_refused(name: str, value: object) -> None:
    other = replace(run(), settings={**run().settings, name: value})
    with pytest.raises(ComparisonError, match=f"{name} differs: .* and {value}"):
        check_comparable([side("a", run()), side("b", other)])


def test_a_setting_that_an_older_run_lacks_is_its_default() -> None:
    older = {name: value for name, value in run().settings.items() if name != "max_retries"}
    newer = {**older, "max_retries": 0, "cancel_rate": 0.0, "timeout_s": None}
    sides = [side(label, replace(run(), settings=settings)) for label, settings in (("a", older), ("b", newer))]
    assert check_comparable(sides) == ()


def test_requests_with_other_latency_targets_are_refused() -> None:
    mix = ServiceMix(classes={name: ServiceClass(name=name, ttft_s=len(name)) for name in ("x", "yy")})

    def with_targets(seed: int, **changes: float) -> RunData:
        made = run()
        classes = [{**one, **changes} for one in mix.as_json()]
        made.requests["service_class"] = mix.draw(40, seed)
        return replace(made, settings={**made.settings, "service_classes": classes})

    assert check_comparable([side("a", with_targets(1)), side("b", with_targets(1))]) == ()
    with pytest.raises(ComparisonError, match=r"service_classes differ: .*latency targets \(a, b\)"):
        check_comparable([side("a", with_targets(1)), side("b", run())])
    with pytest.raises(ComparisonError, match="service_classes differ"):
        check_comparable([side("a", with_targets(1)), side("b", with_targets(1, ttft_s=9.0))])
    with pytest.raises(ComparisonError, match=r"service_class differs in \d+ of 40 requests"):
        check_comparable([side("a", with_targets(1)), side("b", with_targets(2))])


def test_an_invalid_run_is_refused_with_its_reason() -> None:
    with pytest.raises(ComparisonError, match=r"b is INVALID: failed requests: 7 % failed.*--force"):
        check_comparable([side("a", run()), side("b", run(), verdict=INVALID)])


def test_a_run_that_was_stopped_is_refused() -> None:
    """A quiet first part by itself has fewer tokens per second than all of the workload, on the same server."""
    stopped = replace(run(), interrupted=True, ended_s=1.5)
    with pytest.raises(ComparisonError, match=r"b was stopped after 1\.5 s: .*--force"):
        check_comparable([side("a", run()), side("b", stopped)])
    assert len(check_comparable([side("a", stopped), side("b", run())], force=True)) == 1


def test_force_goes_on_and_says_so() -> None:
    problems = check_comparable(
        [side("a", run()), side("b", changed("input_tokens", 3, 1), verdict=INVALID)], force=True
    )
    assert [problem.split(" ")[0] for problem in problems] == ["input_tokens", "b"]


def test_many_problems_are_not_all_spelled_out() -> None:
    with pytest.raises(ComparisonError, match=r"b, run 3 is INVALID.*; and 2 more; run both again"):
        check_comparable([side("a", *[run()] * 5), side("b", *[run()] * 5, verdict=INVALID)])


def test_every_run_of_every_side_is_looked_at() -> None:
    good, bad = run(), changed("arrival_s", 1, 0.1)
    with pytest.raises(ComparisonError, match=r"\(a, a, run 2\)"):
        check_comparable([side("a", good, bad), side("b", good, good)])
    with pytest.raises(ComparisonError, match=r"\(a, c\)"):
        check_comparable([side("a", good), side("b", good), side("c", bad)])


@pytest.mark.parametrize("force", [False, True])
def test_what_cannot_be_paired_is_refused_even_by_force(force: bool) -> None:
    with pytest.raises(ComparisonError, match="cannot be paired: a has 40 and b 41"):
        check_comparable([side("a", run()), side("b", synthetic_run(41))], force=force)
    with pytest.raises(ComparisonError, match="a has 2 runs and b 1"):
        check_comparable([side("a", run(), run()), side("b", run())], force=force)
    with pytest.raises(ComparisonError, match="name at least two"):
        check_comparable([side("a", run())], force=force)
    with pytest.raises(ComparisonError, match="two sides are called 'a'"):
        check_comparable([side("a", run()), side("a", run())], force=force)
