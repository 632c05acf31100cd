"""Command-line flags: a parser that reports a mistake in one line, and flags made from a dataclass.

The servers declare a setting once, as a field of a dataclass. A field declared with `flag` is a flag of its name
(`max_queued_requests` -> `--max-queued-requests`, times without their unit) and the variable `CHAIRLIFT_<FLAG>`. A flag
overrides its variable; an empty variable counts as unset.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        port: int = flag(50051, integer(0, 65535), "port to listen on; 0 selects a free one", group="address")

Commands whose verbs share groups of flags, and that read no variables, have tables of `Flag` instead.
"""

import argparse
import dataclasses
import difflib
import functools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from chairlift.service.flag_kinds import ANY_TEXT, Kind

_MAX_SHOWN_CHARS = 200
_FLAGS_OF_FILES = ("--trace", "--model")  # often meant by a word without a flag
_UNITS = {"_s": "S", "_ms": "MS", "_bytes": "BYTES"}

_Config = TypeVar("_Config")


class FlagError(Exception):
    """A value that its flag cannot have; the message names the flag, the value and what is allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
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
    declared = _Setting(kind, help, group, variable, default_text, tuple(aliases))
    return dataclasses.field(default=default, repr=not secret, metadata={"flag": declared})


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in one line, with the flag that may have been meant.

    Args:
        prog: name of the program, with its verb.
        returns_unknown: `parse_known_args` returns unknown words, for another program, instead of refusing them.
        options: further arguments of ArgumentParser.
    """

    def __init__(self, prog: str, *, returns_unknown: bool = False, **options: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **options)
        self._returns_unknown = returns_unknown

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as usual; a wrong value is an error, and so is an unknown flag, with the closest known one.

        The parser of a verb refuses unknown flags itself: the one above it does not know the verb's flags.
        """
        try:
            options, unknown = super().parse_known_args(args, namespace)
        except FlagError as problem:
            self.error(str(problem))
        if unknown and not self._returns_unknown:
            self.error(self._unknown(unknown))
        return options, unknown

    def _unknown(self, unknown: Sequence[str]) -> str:
        known = [name for action in self._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
        flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        near = [name for flag in flags for name in difflib.get_close_matches(flag, known, 1, 0.7)]
        if not unknown[0].startswith("-"):
            near = [f"{flag} {unknown[0]}" for flag in _FLAGS_OF_FILES if flag in known][:1] + near
        meant = f"; did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
        return f"unknown: {' '.join(unknown)}{meant}"


class Flag(NamedTuple):
    """A flag of a command that reads no variables.

    Attributes:
        name: such as "--workers".
        help: what it sets, its unit and its default; argparse replaces %(default)s.
        kind: what values there are. A switch that is off by default gets no `--no-NAME`.
        metavar: how the help shows a value; "": as the kind says.
        default: the value without the flag.
        aliases: further spellings.
    """

    name: str
    help: str
    kind: Kind = ANY_TEXT
    metavar: str = ""
    default: Any = None
    aliases: Sequence[str] = ()


def add_flag(group: argparse._ActionsContainer, flag: Flag) -> None:
    """Adds a flag to a FlagParser or a group of it; the namespace will hold the parsed value."""
    kind = flag.kind
    options = _argument(kind, flag.metavar or kind.metavar or _last_word(flag.name)) | {"default": flag.default}
    if not kind.is_switch:
        options["type"] = functools.partial(_value, flag.name, kind)
    elif not flag.default:
        options |= {"action": "store_true", "default": False}
    group.add_argument(flag.name, *flag.aliases, help=flag.help, **options)


def _argument(kind: Kind, metavar: str) -> dict[str, Any]:
    """Returns the arguments of `add_argument` that follow from a kind."""
    if kind.is_switch:
        return {"action": argparse.BooleanOptionalAction}
    if kind.takes_several:
        return {"action": "extend", "nargs": "+", "metavar": metavar}
    if kind.separator is not None:
        return {"action": "append", "metavar": metavar}
    return {"metavar": metavar}


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
        shown = argparse.SUPPRESS if field.name in hidden else _help(field)
        options = _argument(declared.kind, _metavar(field))
        group.add_argument(_name(field), *declared.aliases, dest=field.name, help=shown, **options)


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


def _flags(config_type: type) -> Iterator[tuple["dataclasses.Field[Any]", _Setting]]:
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
    return unit or kind.metavar or _last_word(field.name)


def _last_word(name: str) -> str:
    return name.replace("-", "_").rpartition("_")[2].upper()


def _help(field: "dataclasses.Field[Any]") -> str:
    declared: _Setting = field.metadata["flag"]
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
        return kind.value_of(raw)
    except ValueError:
        raise _refusal(name, raw, kind) from None


def _refusal(name: str, value: object, kind: Kind) -> FlagError:
    shown = str(value) or "empty"
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = f"{shown[:_MAX_SHOWN_CHARS]}..."
    if not shown.isprintable():  # a line break, for one
        shown = repr(shown)
    return FlagError(f"{name} is {shown}, it must be {kind.allowed}")
