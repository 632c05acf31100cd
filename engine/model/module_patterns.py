"""Lists of module names in `quantization_config`, compiled to patterns that cannot take exponential time."""

import re

from engine.model.config_fields import ConfigFields

_MAX_NAMES = 4096
_MAX_REPEATS = 4
_REPEAT = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def module_patterns(section: ConfigFields, field: str) -> tuple[re.Pattern[str], ...]:
    """Compiles a list of names of layers or their parents, suffixes of such names, and patterns after "re:".

    Raises: CheckpointError: the field is no such list, or has too many or too complex patterns.
    """
    names = section.raw(field, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and len(name) <= 1000 for name in names):
        raise section.error(field, f"is {names!r}, expected a list of module names")
    if len(names) > _MAX_NAMES:
        raise section.error(field, f"has {len(names)} entries, at most {_MAX_NAMES} are allowed")
    patterns = [name.removeprefix("re:") for name in names if name.startswith("re:")]
    for pattern in patterns:  # matching may otherwise take exponential time
        if len(_REPEAT.findall(pattern)) > _MAX_REPEATS or _REPEATED_GROUP.search(pattern):
            raise section.error(
                field, f"has the pattern {pattern!r}, supported are {_MAX_REPEATS} repeats and no repeated groups"
            )
    names = [name for name in names if not name.startswith("re:")]
    try:
        return tuple(
            re.compile(pattern) for pattern in patterns + [rf"(.*\.)?{re.escape(name)}(\.|$)" for name in names]
        )
    except re.error as error:
        raise section.error(field, f"has the invalid pattern {error.pattern!r}: {error}") from error
