"""Command-line flags and environment variables made from a dataclass; one declaration per setting.

A field declared with `flag` is a flag of its name (`max_queued_requests` -> `--max-queued-requests`, times without
their unit) and the variable `CHAIRLIFT_<FLAG>`. A flag overrides its variable; an empty variable counts as unset.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        port: int = flag(50051, integer(0, 65535), "port to listen on; 0 selects a free one", group="address")
"""

import argparse
import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SWITCH_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_MAX_SHOWN_CHARS = 200
_UNITS = {"_s": "S", "_ms": "MS", "_bytes": "BYTES"}

_Config = TypeVar("_Config")


class FlagError(Exception):
    """A value that its flag cannot have; the message names the flag, the value and what is allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values.

    Attributes:
        parse: makes a value of a text; raises ValueError or OverflowError.
        is_allowed: whether a value is in range.
        allowed: the range, in words that follow "it must be".
        metavar: how the help shows a value; empty: by the flag's name.
        separator: if not None, the flag may be repeated; the variable's values are separated by this text, or are one
            value if it is empty.
        takes_several: whether a repeated flag also takes several values at once: `--x a b`.
    """

    parse: Callable[[str], Any]
    is_allowed: Callable[[Any], bool]
    allowed: str
    metavar: str = ""
    separator: str | None = None
    takes_several: bool = False


def text(
    allowed: str = "a non-empty text", is_allowed: Callable[[str], bool] = lambda text: bool(text.strip()), *,
    metavar: str = "",
) -> Kind:  # fmt: skip
    """A text; by default any that is not empty."""
    return Kind(str, is_allowed, allowed, metavar)


def choice(values: Sequence[str]) -> Kind:
    """One of a few texts."""
    listed = ", ".join(values)
    metavar = "{" + ",".join(values) + "}"
    return Kind(str, lambda value: value in values, f"one of {listed}", metavar if len(metavar) <= 40 else "")


def path() -> Kind:
    """A path; whether it exists is not checked."""
    return Kind(Path, lambda _: True, "a path", "PATH")


def integer(low: int, high: int | None = None, *, only: Collection[int] = ()) -> Kind:
    """A whole number; a suffix multiplies it: 2k is 2000, 2K is 2048, 4G is 4294967296.

    Args:
        low: smallest value.
        high: largest value; None: any.
        only: the values to choose from, if not all between.
    """
    allowed = f"a whole number between {low} and {high}" if high is not None else f"a whole number, at least {low}"
    if only:
        allowed = f"one of {', '.join(map(str, only))}"
    return Kind(
        _parse_integer,
        lambda value: low <= value and (high is None or value <= high) and (not only or value in only),
        allowed,
        "N",
    )


def number(low: float, high: float = math.inf) -> Kind:
    """A finite number in a range."""
    allowed = f"a number between {low:g} and {high:g}" if high < math.inf else f"a number, at least {low:g}"
    return Kind(float, lambda value: math.isfinite(value) and low <= value <= high, allowed, "X")


def optional(kind: Kind, *words: str) -> Kind:
    """Another kind, or one of the words, which stand for None."""
    return dataclasses.replace(
        kind,
        parse=lambda value: None if value in words else kind.parse(value),
        allowed=f"{kind.allowed}, or {words[0]}",
    )


def switch() -> Kind:
    """On or off: `--x` and `--no-x`, or one of eight words in the variable."""
    return Kind(_parse_switch, lambda value: isinstance(value, bool), f"one of {', '.join(_SWITCH_WORDS)}")


def repeated(kind: Kind, separator: str = ",", *, takes_several: bool = False) -> Kind:
    """A tuple of values: the flag may be repeated, or take several at once; the variable separates them."""
    return dataclasses.replace(kind, separator=separator, takes_several=takes_several)


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    """What `flag` declares."""

    kind: Kind
    help: str
    group: str
    variable: str
    default_text: str
    aliases: tuple[str, ...]


def flag(
    default: Any,
    kind: Kind,
    help: str,  # noqa: A002 - argparse's name
    *,
    group: str = "",
    variable: str = "",
    default_text: str = "",
    aliases: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """Declares a field of a dataclass as a flag.

    Args:
        default: the field's default. None, "" and () mean unset and are always allowed.
        kind: what values there are.
        help: what it sets, its unit, and when to change it.
        group: section of the help that begins here; empty: that of the field before.
        variable: environment variable, if not CHAIRLIFT_<FLAG>.
        default_text: the default in words, if it depends on something.
        aliases: further spellings, as `-tp`.
        secret: keep the value out of the config's repr.
    """
    declared = _Flag(kind, help, group, variable, default_text, tuple(aliases))
    return dataclasses.field(default=default, repr=not secret, metadata={"flag": declared})


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in one line, with the flag that may have been meant."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as usual; an unknown flag is an error that names the closest known one."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_flags(self, unknown))
        return options


def unknown_flags(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Returns the error about unknown words of a command line; it names the closest known flags."""
    known = [name for action in parser._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    near = [name for flag in flags for name in difflib.get_close_matches(flag, known, 1, 0.7)]
    if "--model" in known and not unknown[0].startswith("-"):
        near.insert(0, f"--model {unknown[0]}")
    meant = f"; did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
    return f"unknown: {' '.join(unknown)}{meant}"


def add_flags(parser: argparse.ArgumentParser, config_type: type, *, hidden: Collection[str] = ()) -> None:
    """Adds the flags of a dataclass to a parser.

    Args:
        parser: gets an argument group for each group of flags.
        config_type: dataclass with fields declared by `flag`.
        hidden: fields that the help leaves out.
    """
    group: argparse._ActionsContainer = parser
    for field, declared in _flags(config_type):
        if declared.group:
            group = parser.add_argument_group(declared.group)
        is_switch = declared.kind.parse is _parse_switch
        options: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if is_switch else {"metavar": _metavar(field)}
        )
        if declared.kind.takes_several:
            options |= {"action": "extend", "nargs": "+"}
        elif declared.kind.separator is not None:
            options["action"] = "append"
        options |= {"dest": field.name, "default": None}
        shown = argparse.SUPPRESS if field.name in hidden else _help(field)
        group.add_argument(_name(field), *declared.aliases, help=shown, **options)


def config_from(
    arguments: argparse.Namespace,
    config_type: type[_Config],
    environ: Mapping[str, str] = os.environ,
    *,
    error: type[Exception] = FlagError,
) -> _Config:
    """Makes a config of parsed flags and environment variables.

    Args:
        arguments: what a parser with `add_flags` returned.
        config_type: the dataclass.
        environ: the environment variables.
        error: raised by the dataclass itself for a value, with a message that begins with a flag's name.

    Raises:
        FlagError: a value is out of range. The message names the variable if the value came from there.
    """
    values, sources = {}, {}
    for field, declared in _flags(config_type):
        raw = getattr(arguments, field.name)
        name, variable = _name(field), _variable(field)
        sources[name] = ""
        if raw is None and environ.get(variable):
            raw = environ[variable]
            sources[name] = f" (from {variable})"
            if declared.kind.separator is not None:
                raw = raw.split(declared.kind.separator) if declared.kind.separator else [raw]
        if raw is None:
            continue
        try:
            if declared.kind.separator is None:
                values[field.name] = _value(name, declared.kind, raw)
            else:
                values[field.name] = tuple(_value(name, declared.kind, each) for each in raw)
        except FlagError as problem:
            raise FlagError(f"{problem}{sources[name]}") from None
    try:
        return config_type(**values)
    except error as problem:
        raise FlagError(f"{problem}{sources.get(str(problem).partition(' ')[0], '')}") from problem


def check_flags(config: Any) -> None:
    """Checks every field of a config made in code.

    Raises:
        FlagError: a value is out of range.
    """
    for field, declared in _flags(type(config)):
        value = getattr(config, field.name)
        for each in value if isinstance(value, tuple) else [value]:
            if each is not None and each != "" and not declared.kind.is_allowed(each):
                raise _refusal(_name(field), each, declared.kind)


def _flags(config_type: type) -> Iterator[tuple["dataclasses.Field[Any]", _Flag]]:
    for field in dataclasses.fields(config_type):
        yield field, field.metadata["flag"]


def _name(field: "dataclasses.Field[Any]") -> str:
    return "--" + field.name.removesuffix("_s").replace("_", "-")


def _variable(field: "dataclasses.Field[Any]") -> str:
    variable: str = field.metadata["flag"].variable
    return variable or "CHAIRLIFT_" + field.name.removesuffix("_s").upper()


def _metavar(field: "dataclasses.Field[Any]") -> str:
    kind = field.metadata["flag"].kind
    unit = next((unit for end, unit in _UNITS.items() if field.name.endswith(end)), "")
    return unit or kind.metavar or field.name.rpartition("_")[2].upper()


def _help(field: "dataclasses.Field[Any]") -> str:
    declared: _Flag = field.metadata["flag"]
    default = declared.default_text or _shown(field.default)
    text = f"{declared.help} (default: {default})" if default else declared.help
    return f"{text} [{_variable(field)}]".replace("%", "%%")


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default)
    return "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)


def _value(name: str, kind: Kind, raw: Any) -> Any:
    if isinstance(raw, bool):  # a switch on the command line
        return raw
    try:
        value = kind.parse(raw)
    except (ValueError, OverflowError):
        raise _refusal(name, raw, kind) from None
    if value is not None and not kind.is_allowed(value):
        raise _refusal(name, raw, kind)
    return value


def _refusal(name: str, value: object, kind: Kind) -> FlagError:
    shown = str(value) or "empty"
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = f"{shown[:_MAX_SHOWN_CHARS]}..."
    if not shown.isprintable():  # a line break, for one
        shown = repr(shown)
    return FlagError(f"{name} is {shown}, it must be {kind.allowed}")


def _parse_integer(value: str) -> int:
    factor = _SUFFIXES.get(value[-1:])
    return int(value) if factor is None else int(float(value[:-1]) * factor)


def _parse_switch(value: str) -> bool:
    if value.lower() not in _SWITCH_WORDS:
        raise ValueError
    return _SWITCH_WORDS[value.lower()]
