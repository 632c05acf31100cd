"""Results, their tables and the report file."""

import json
import re
from pathlib import Path

import pytest

from chairlift.bench.report import Result, format_table, git_revision, markdown_table, write_report


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


def test_a_fraction_says_how_much_of_the_floor_was_reached() -> None:
    assert Result("G10", "rate", 80.0, "GB/s", floor=100.0).fraction == 0.8
    assert Result("G1", "time", 4.0, "ms", direction="at most", floor=3.0).fraction == 0.75
    assert Result("C9", "loss", 4.0, "%", direction="at most", floor=0.0).fraction is None


def test_tables_hold_figures_goals_and_verdicts() -> None:
    fast = Result("C3", "fp32 against others", 4.123, "x", goal=4.0, floor=5.0, note="fine | good")
    slow = Result("C16", "a step", 0.61, "ms", goal=0.5, direction="at most")
    lines = format_table((fast, slow, Result("C16", "tokens/s", 12345.6))).splitlines()
    assert re.split("  +", lines[1]) == [
        "C3",
        "fp32 against others",
        "4.12 x",
        ">= 4",
        "5",
        "82.5 %",
        "met",
        "fine | good",
    ]
    assert re.split("  +", lines[2]) == ["C16", "a step", "0.610 ms", "<= 0.500", "MISSED"]
    assert re.split("  +", lines[3]) == ["C16", "tokens/s", "12,346"]
    assert markdown_table((fast,)).splitlines()[2] == (
        r"| C3 | fp32 against others | 4.12 x | >= 4 | 5 | 82.5 % | met | fine \| good |"
    )


def test_a_result_beside_another_notes_the_ratio_of_their_fractions() -> None:
    equal = Result("G1", "equal", 80.0, "GB/s", floor=100.0)
    uneven = Result("", "uneven", 5.0, "us", direction="at most", floor=3.0, note="error 0")
    assert uneven.beside(equal, "equal lengths").note == "0.75x the fraction of equal lengths; error 0"
    assert uneven.beside(Result("", "no floor", 80.0), "equal lengths") == uneven


def test_a_result_survives_json() -> None:
    result = Result("G1", "time", 4.0, "ms", direction="at most", floor=3.0, goal=4.1)
    assert Result.from_json(json.loads(json.dumps(result.as_json()))) == result


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
