"""Tables of flags."""

from typing import Any

import pytest

from chairlift.service.flag_kinds import integer, switch
from chairlift.service.flags import Flag, FlagParser
from loadgen.cli import calibrate, compare, report, run, simulate, sweep
from loadgen.cli.flags import add_flags


def test_switches_that_are_on_can_be_turned_off_and_a_flag_is_added_once() -> None:
    parser = FlagParser("program")
    add_flags(
        parser,
        [
            Flag("--on", "x", switch(), default=True),
            Flag("--off", "x", switch()),
            Flag("--n", "x", integer(0), default=2),
        ],
    )
    add_flags(parser, [Flag("--n", "y", integer(0), default=9)])
    assert vars(parser.parse_args([])) == {"on": True, "off": False, "n": 2}
    assert vars(parser.parse_args(["--no-on", "--off", "--n", "3"])) == {"on": False, "off": True, "n": 3}
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-off"])


@pytest.mark.parametrize(("verb", "needed"), [(run, []), (sweep, ["--rates", "1"]), (report, ["x"]), (compare, ["x"])])
def test_limits_of_several_flags_all_count(verb: Any, needed: list[str]) -> None:
    parser = verb.make_parser("program")
    limits = ["--goodput", "ttft:500", "e2el:9000", "--goodput", "tpot:50"]
    expected = [("ttft", 500.0), ("e2el", 9000.0), ("tpot", 50.0)]
    assert parser.parse_args([*needed, *limits]).goodput == expected
    assert parser.parse_args([*needed, *limits]).goodput == expected  # nothing is left of the first time
    assert parser.parse_args([*needed, "--slo", "ttft:1", "--slo", "tpot:2"]).goodput == [("ttft", 1), ("tpot", 2)]


def test_policies_of_several_flags_all_count() -> None:
    parser = simulate.make_parser("program")
    options = parser.parse_args(["--trace", "x", "--policy", "fcfs", "slo", "--policy", "static"])
    assert options.policy == ["fcfs", "slo", "static"]


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        (simulate, ["--trace", "x", "--duration", "0"]),
        (sweep, ["--rates", "1", "--level-duration", "0s"]),
        (calibrate, ["--hold", "50ms"]),
    ],
)
def test_durations_in_which_nothing_can_be_measured_are_refused(
    verb: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    *_, flag, value = arguments
    with pytest.raises(SystemExit):
        verb.make_parser("program").parse_args(arguments)
    assert f"{flag} is {value}, it must be a duration " in capsys.readouterr().err
