"""Lists of module names in `quantization_config`, compiled to patterns that cannot take exponential time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from engine.model.config_fields import ConfigFields
from engine.model.text_part import stored_names

MAX_NAMES = 4096
_MAX_LENGTH = 1000
_MAX_REPEATS = 4
_MAX_WILDCARDS = 3  # besides the one for the parents of a module
_REPEAT = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


class ModulePattern(Protocol):
    """What selects modules by their names: a regular expression, or `ModuleNames`."""

    def match(self, module: str, /) -> object | None:
        """Returns None if the module is not selected."""
        ...


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Selects modules that have one of these names, with any parents, and those below them.

    However many names there are, a module takes as many look-ups as its own name has runs of parts: checkpoints list
    thousands of names and have tens of thousands of experts.
    """

    names: frozenset[str]

    def match(self, module: str, /) -> str | None:
        """Returns the name by which a module is selected; None: it is not."""
        return next((run for run in _runs(module) if run in self.names), None)


def _runs(module: str) -> Iterator[str]:
    """Returns each part of a name, and each sequence of them: a.b -> a, a.b, b."""
    parts = module.split(".")
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])


def num_names(patterns: tuple[ModulePattern, ...]) -> int:
    """Returns how many names and patterns there are."""
    return sum(len(pattern.names) if isinstance(pattern, ModuleNames) else 1 for pattern in patterns)


def module_patterns(section: ConfigFields, field: str) -> tuple[ModulePattern, ...]:
    """Compiles a list of names of layers or their parents, suffixes of such names, and patterns after "re:".

    A `*` in a name stands for any characters, and a dot at its end for nothing. Names may be in lists of their own.

    Raises: CheckpointError: the field is no such list, or has too many or too complex patterns.
    """
    value = section.raw(field, [])
    items = value if isinstance(value, list) else [value]
    names = [name for item in items for name in (item if isinstance(item, list) else [item])]
    if not isinstance(value, list) or not all(isinstance(name, str) and len(name) <= _MAX_LENGTH for name in names):
        raise section.error(field, f"is {value!r}, expected a list of module names")
    if len(names) > MAX_NAMES:
        raise section.error(field, f"has {len(names)} entries, at most {MAX_NAMES} are allowed")
    patterns = [name.removeprefix("re:") for name in names if name.startswith("re:")]
    names = [name for name in names if not name.startswith("re:")]
    if complex_name := next((name for name in names if name.count("*") > _MAX_WILDCARDS), None):
        raise section.error(field, f"has the name {complex_name!r}, supported are {_MAX_WILDCARDS} of '*'")
    names = [name.rstrip(".") for name in names]
    plain = frozenset(name for name in names if "*" not in name)
    wild = (re.escape(name).replace(r"\*", ".*") for name in names if "*" in name)
    of_names = *((ModuleNames(plain),) if plain else ()), *(re.compile(rf"(.*\.)?{name}(\.|$)") for name in wild)
    return *_compiled(section, field, patterns), *of_names


def skipped_modules(section: ConfigFields, field: str) -> tuple[ModulePattern, ...]:
    """Compiles rules of GPTQModel that skip modules: an object whose names are patterns after "-:".

    Other rules are of modules with settings of their own; those that have none, as of Qwen3.5, change nothing.

    Raises: CheckpointError: another rule, or see `module_patterns`.
    """
    rules = section.raw(field, {})
    if not isinstance(rules, dict):
        raise section.error(field, f"is {rules!r}, expected an object of rules")
    if len(rules) > MAX_NAMES:
        raise section.error(field, f"has {len(rules)} entries, at most {MAX_NAMES} are allowed")
    if other := next((rule for rule, own in rules.items() if own and not rule.startswith("-:")), None):
        raise section.error(
            field, f"has other settings for {other!r}, supported are the same for all modules, and '-:' that skips some"
        )
    return _compiled(section, field, [rule.removeprefix("-:") for rule in rules if rule.startswith("-:")])


def targeted_modules(group: ConfigFields) -> tuple[ModulePattern, ...] | None:
    """Compiles the `targets` of compressed-tensors; None: all linear layers.

    Raises: CheckpointError: see `module_patterns`.
    """
    return None if "Linear" in group.raw("targets", ["Linear"]) else module_patterns(group, "targets")


def is_selected(module: str, exceptions: tuple[ModulePattern, ...], only: tuple[ModulePattern, ...] | None) -> bool:
    """Whether a module is none of the exceptions and one of `only`; None: all others.

    A checkpoint with images lists the modules of its text part by the names that it stores them under.
    """
    names = stored_names(module)

    def is_listed(patterns: tuple[ModulePattern, ...]) -> bool:
        return any(pattern.match(name) for pattern in patterns for name in names)

    return (only is None or is_listed(only)) and not is_listed(exceptions)


def _compiled(section: ConfigFields, field: str, patterns: list[str]) -> tuple[re.Pattern[str], ...]:
    for pattern in patterns:  # matching may otherwise take exponential time
        if (
            len(pattern) > _MAX_LENGTH
            or len(_REPEAT.findall(pattern)) > _MAX_REPEATS
            or _REPEATED_GROUP.search(pattern)
        ):
            raise section.error(
                field, f"has the pattern {pattern!r}, supported are {_MAX_REPEATS} repeats and no repeated groups"
            )
    try:
        return tuple(map(re.compile, patterns))
    except re.error as error:
        raise section.error(field, f"has the invalid pattern {error.pattern!r}: {error}") from error
