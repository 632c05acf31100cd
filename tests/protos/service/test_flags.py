"""Flags and variables made from a dataclass: values, ranges, precedence, and one line for each mistake."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from chairlift.service.flag_kinds import choice, integer, notation, number, optional, path, repeated, switch, text
from chairlift.service.flags import (
    Flag,
    FlagError,
    FlagParser,
    add_flag,
    add_flags,
    check_flags,
    config_from,
    flag,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    host: str = flag("127.0.0.1", text(), "address", group="network", variable="CHAIRLIFT_OTHER_HOST")
    port: int = flag(80, integer(0, 65535), "port")
    size_bytes: int | None = flag(None, integer(1), "size", group="sizes", default_text="half of the memory")
    length: int | None = flag(None, optional(integer(2, 100), "auto", "-1"), "length", aliases=["-l"])
    block: int = flag(16, integer(1, 128, only=(16, 32)), "block")
    share: float = flag(0.5, number(0.01, 1), "share, in %")
    stall_timeout_s: float = flag(60.0, number(0), "seconds")
    policy: str = flag("fcfs", choice(("fcfs", "priority")), "policy")
    cache: bool = flag(True, switch(), "cache")
    fast: bool | None = flag(None, switch(), "fast", default_text="on with a GPU")
    log: Path | None = flag(None, path(), "file")
    engine: tuple[str, ...] = flag(("a:1",), repeated(text()), "engines")
    key: tuple[str, ...] = flag((), repeated(text(metavar="KEY"), ""), "key", secret=True)
    label: tuple[str, ...] = flag((), repeated(text(), takes_several=True), "labels")

    def __post_init__(self) -> None:
        if self.port == 13:
            raise RuntimeError("--port is 13, which brings bad luck")


def parse(*argv: str, **environ: str) -> Config:
    parser = FlagParser("program", description="Does it.")
    add_flags(parser, Config, hidden=("log",))
    try:
        return config_from(parser.parse_args(argv), Config, environ, error=RuntimeError)
    except FlagError as error:
        parser.error(str(error))


def refused(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    """The one line on stderr, without its frame."""
    with pytest.raises(SystemExit) as caught:
        parse(*argv, **environ)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("program: error: ")
    assert err.endswith(" (see program --help)\n")
    assert err.count("\n") == 1
    return err.removeprefix("program: error: ").removesuffix(" (see program --help)\n")


def test_without_flags_all_is_the_default() -> None:
    assert parse() == Config()


def test_every_kind_of_value_is_parsed() -> None:
    argv = (
        "--host h --port 2k --size-bytes 1.5G -l 2 --block 32 --share 1 --stall-timeout 2.5 --policy priority "
        "--no-cache --fast --log l.txt --engine b:2 --engine=c:3 --key x --key y,z --label 1 2 --label=3"
    )
    assert parse(*argv.split()) == Config(
        host="h", port=2000, size_bytes=3 * 2**29, length=2, block=32, share=1.0, stall_timeout_s=2.5,
        policy="priority", cache=False, fast=True, log=Path("l.txt"), engine=("b:2", "c:3"), key=("x", "y,z"),
        label=("1", "2", "3"),
    )  # fmt: skip


@pytest.mark.parametrize("value", ["auto", "-1"])
def test_words_stand_for_no_value(value: str) -> None:
    assert parse(f"--length={value}").length is None


def test_variables_set_what_the_command_line_does_not() -> None:
    environ = {
        "CHAIRLIFT_OTHER_HOST": "there", "CHAIRLIFT_HOST": "not this", "CHAIRLIFT_PORT": "7", "CHAIRLIFT_LENGTH": "9",
        "CHAIRLIFT_STALL_TIMEOUT": "3", "CHAIRLIFT_CACHE": "off", "CHAIRLIFT_FAST": "YES", "CHAIRLIFT_LOG": "",
        "CHAIRLIFT_ENGINE": "b:2,c:3", "CHAIRLIFT_KEY": "y,z",
    }  # fmt: skip
    config = parse("--port", "8", "--fast", **environ)
    assert config == Config(
        host="there", port=8, length=9, stall_timeout_s=3.0, cache=False, fast=True, engine=("b:2", "c:3"), key=("y,z",)
    )
    assert parse("--engine", "d:4", "--cache", **environ).engine == ("d:4",)
    assert parse("--cache", **environ).cache


def test_help_has_value_default_unit_and_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        parse("--help", CHAIRLIFT_KEY="a-secret")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    shown = shown.replace("--length, -l N", "--length N, -l N")  # before Python 3.13 each name has the value
    for line in (
        "network: --host HOST address (default: 127.0.0.1) [CHAIRLIFT_OTHER_HOST]",
        "--port N port (default: 80) [CHAIRLIFT_PORT]",
        "sizes: --size-bytes BYTES size (default: half of the memory) [CHAIRLIFT_SIZE_BYTES]",
        "--length N, -l N length [CHAIRLIFT_LENGTH]",
        "--share X share, in % (default: 0.5) [CHAIRLIFT_SHARE]",
        "--stall-timeout S seconds (default: 60) [CHAIRLIFT_STALL_TIMEOUT]",
        "--policy {fcfs,priority} policy (default: fcfs) [CHAIRLIFT_POLICY]",
        "--cache, --no-cache cache (default: on) [CHAIRLIFT_CACHE]",
        "--fast, --no-fast fast (default: on with a GPU) [CHAIRLIFT_FAST]",
        "--engine ENGINE engines (default: a:1) [CHAIRLIFT_ENGINE]",
        "--key KEY key [CHAIRLIFT_KEY]",
        "--label LABEL [LABEL ...] labels [CHAIRLIFT_LABEL]",
    ):
        assert line in shown
    for word in ("--log", "None", "a-secret"):
        assert word not in shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--port 70000", "--port is 70000, it must be a whole number between 0 and 65535"),
        ("--port many", "--port is many, it must be a whole number"),
        (f"--port {300 * 'x'}", f"--port is {200 * 'x'}..., it must be a whole number"),
        ("--port \x01", r"--port is '\x01', it must be a whole number"),
        ("--size-bytes 0", "--size-bytes is 0, it must be a whole number, at least 1"),
        ("--size-bytes lotsG", "--size-bytes is lotsG, it must be a whole number"),
        ("--size-bytes infG", "--size-bytes is infG, it must be a whole number"),
        ("--length 1", "--length is 1, it must be a whole number between 2 and 100, or auto"),
        ("--block 24", "--block is 24, it must be one of 16, 32"),
        ("--share 1.5", "--share is 1.5, it must be a number between 0.01 and 1"),
        ("--share nan", "--share is nan, it must be a number"),
        ("--stall-timeout -1", "--stall-timeout is -1, it must be a number, at least 0"),
        ("--stall-timeout inf", "--stall-timeout is inf, it must be a number, at least 0"),
        ("--policy sjf", "--policy is sjf, it must be one of fcfs, priority"),
        ("--host=", "--host is empty, it must be a non-empty text"),
        ("--port 13", "--port is 13, which brings bad luck"),
        ("--hots h", "unknown: --hots h; did you mean --host?"),
        ("--polcy=x --zzz", "unknown: --polcy=x --zzz; did you mean --policy?"),
        ("--por 3", "unknown: --por 3; did you mean --port?"),
        ("--zzz=1", "unknown: --zzz=1"),
    ],
)
def test_a_bad_flag_is_one_line_with_the_range(capsys: pytest.CaptureFixture[str], argv: str, says: str) -> None:
    assert refused(capsys, *argv.split(), CHAIRLIFT_KEY="a-secret").startswith(says)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("PORT", "x", "--port is x, it must be a whole number between 0 and 65535 (from CHAIRLIFT_PORT)"),
        ("PORT", "13", "--port is 13, which brings bad luck (from CHAIRLIFT_PORT)"),
        (
            "CACHE",
            "maybe",
            "--cache is maybe, it must be one of 1, true, yes, on, 0, false, no, off (from CHAIRLIFT_CACHE)",
        ),
        ("ENGINE", "a:1,,b:2", "--engine is empty, it must be a non-empty text (from CHAIRLIFT_ENGINE)"),
    ],
)
def test_a_bad_variable_is_named(capsys: pytest.CaptureFixture[str], variable: str, value: str, says: str) -> None:
    assert refused(capsys, **{f"CHAIRLIFT_{variable}": value}) == says


@pytest.mark.parametrize("argv", [["--port", "13"], ["--port=13"]])
def test_a_variable_that_a_flag_overrides_is_not_named(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert refused(capsys, *argv, CHAIRLIFT_PORT="1") == "--port is 13, which brings bad luck"


def test_a_config_made_in_code_can_be_checked() -> None:
    check_flags(Config())
    for config in (Config(port=-1), Config(engine=("a:1", " ")), Config(stall_timeout_s=float("nan"))):
        with pytest.raises(FlagError, match=r"^--(port|engine|stall-timeout) is "):
            check_flags(config)


def test_a_secret_is_in_no_repr() -> None:
    assert "x" not in repr(Config(key=("x",))).replace("prefix", "")


def test_unknown_flags_may_be_left_to_another_program() -> None:
    parser = FlagParser("up", returns_unknown=True)
    add_flags(parser, Config)
    arguments, rest = parser.parse_known_args(["--max-num-seqs", "4", "--port", "1", "--por", "2"])
    assert rest == ["--max-num-seqs", "4", "--por", "2"]  # no abbreviations: they may be the other program's
    assert config_from(arguments, Config, {}).port == 1
    assert isinstance(arguments, argparse.Namespace)


_TABLE = (
    Flag("--num-seats", "seats", integer(1), default=2),
    Flag("--load", "load", number(above=0, below=1)),
    Flag("--pair", "pair", notation(lambda text: tuple(map(int, text.split(":", 1))), "A:B", "A:B")),
    Flag("--limit", "limits", repeated(number(0), takes_several=True), default=[], aliases=["--most"]),
    Flag("--fast", "fast", switch(), default=True),
    Flag("--dry-run", "dry", switch()),
    Flag("--name", "name", metavar="TEXT"),
)


def with_verb() -> FlagParser:
    """A program with the verb `go`, which has the flags of the table."""
    parser = FlagParser("program")
    verb = parser.add_subparsers().add_parser("go")
    for each in _TABLE:
        add_flag(verb, each)
    return parser


def test_flags_of_a_table_are_parsed_or_have_their_default() -> None:
    defaults = {
        "num_seats": 2, "load": None, "pair": None, "limit": [], "fast": True, "dry_run": False, "name": None,
    }  # fmt: skip
    assert vars(with_verb().parse_args(["go"])) == defaults
    given = "go --num-seats 2k --load .5 --pair 3:4 --limit 1 2 --most 3 --no-fast --dry-run --name="
    assert vars(with_verb().parse_args(given.split())) == {
        "num_seats": 2000, "load": 0.5, "pair": (3, 4), "limit": [1, 2, 3], "fast": False, "dry_run": True, "name": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--num-seats 0", "--num-seats is 0, it must be a whole number, at least 1"),
        ("--load 1", "--load is 1, it must be a number above 0 and below 1"),
        ("--load 0", "--load is 0, it must be a number above 0 and below 1"),
        ("--pair 3:x", "--pair is 3:x, it must be A:B"),
        ("--most 1 -1.5", "--limit is -1.5, it must be a number, at least 0"),
        ("--no-dry-run", "unknown: --no-dry-run; did you mean --dry-run?"),
        ("--num-seat 3", "unknown: --num-seat 3; did you mean --num-seats?"),
    ],
)
def test_a_verb_refuses_its_wrong_flags_itself(capsys: pytest.CaptureFixture[str], argv: str, says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        with_verb().parse_args(["go", *argv.split()])
    assert capsys.readouterr().err == f"program go: error: {says} (see program go --help)\n"


def test_help_of_a_table_has_the_values(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        with_verb().parse_args(["go", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "--num-seats N seats",
        "--pair A:B pair",
        "--fast, --no-fast fast",
        "--dry-run dry",
        "--name TEXT name",
    ):
        assert line in shown


@pytest.mark.parametrize(("flags", "meant"), [(["--model"], "--model"), (["--model", "--trace"], "--trace")])
def test_a_word_without_a_flag_may_be_the_file(
    capsys: pytest.CaptureFixture[str], flags: list[str], meant: str
) -> None:
    parser = FlagParser("program")
    for name in flags:
        add_flag(parser, Flag(name, "file", path()))
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["a.csv"])
    assert f"unknown: a.csv; did you mean {meant} a.csv?" in capsys.readouterr().err
