"""Tables of flags."""

import pytest

from loadgen.cli.flags import Flag, Parser, add_flags


def test_switches_that_are_on_can_be_turned_off_and_a_flag_is_added_once() -> None:
    parser = Parser()
    add_flags(
        parser, [Flag("--on", "x", bool, default=True), Flag("--off", "x", bool), Flag("--n", "x", int, default=2)]
    )
    add_flags(parser, [Flag("--n", "y", int, default=9)])
    assert vars(parser.parse_args([])) == {"on": True, "off": False, "n": 2}
    assert vars(parser.parse_args(["--no-on", "--off", "--n", "3"])) == {"on": False, "off": True, "n": 3}
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-off"])
