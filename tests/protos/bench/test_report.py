"""The table is aligned and honest, and the file holds everything."""

import json
from pathlib import Path

import pytest

from chairlift.bench.report import Result, format_table, git_revision, write_report


@pytest.mark.parametrize(
    ("figure", "goal", "direction", "met"),
    [
        (4.0, 4.0, "at least", True),
        (3.99, 4.0, "at least", False),
        (3.0, 3.0, "at most", True),
        (3.1, 3.0, "at most", False),
        (0.0, None, "at least", True),
    ],
)
def test_a_goal_is_met_on_its_good_side(figure: float, goal: float | None, direction: str, met: bool) -> None:
    assert Result("C0", "what", figure, goal=goal, direction=direction).met is met


def test_the_table_is_aligned_and_says_what_is_missed() -> None:
    table = format_table(
        (
            Result("C3", "fp32 against others", 4.123, "x", goal=4.0, floor=5.4, note="fine"),
            Result("C16", "a step", 0.61, "ms", goal=0.5, direction="at most"),
            Result("C16", "tokens/s", 12345.6),
            Result("C11", "sequences", 426.4, floor=64),
        )
    )
    assert table.splitlines() == [
        "id   what                   figure      goal  limit          note",
        "C3   fp32 against others    4.12 x      >= 4   5.40  met     fine",
        "C16  a step               0.610 ms  <= 0.500         MISSED",
        "C16  tokens/s               12,346",
        "C11  sequences                 426               64",
    ]


def test_the_file_holds_results_samples_machine_and_arguments(tmp_path: Path) -> None:
    path = write_report(
        tmp_path / "made",
        "some-benchmark",
        results=[Result("C3", "what", 5.0, goal=4.0)],
        raw={"seconds": {"ours": (1.0, 2.0)}},
        machine={"cpu": "a CPU"},
        arguments={"rounds": 2},
    )
    report = json.loads(path.read_text())
    assert path.name.startswith("some-benchmark-")
    assert report["raw"] == {"seconds": {"ours": [1.0, 2.0]}}
    assert report["results"][0]["met"] is True
    assert (report["machine"], report["arguments"]) == ({"cpu": "a CPU"}, {"rounds": 2})
    assert report["revision"] == git_revision()


def test_outside_a_repository_there_is_no_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) == ""
