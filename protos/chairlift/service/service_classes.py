"""Service classes: named latency targets, from the TOML file of `--service-classes`. Standard library only.

[classes.interactive]
ttft_ms = 500                # first token, from the arrival of the request
inter_token_ms = 30          # between tokens; or tokens_per_second = 33.3, not both
weight = 2.0                 # value of one request relative to other classes; default 1
pacing = "gap"               # "gap": every gap counts; "paced": early tokens make up for later gaps
when_infeasible = "refuse"   # "refuse", "degrade" or "wait" (default) if ttft_ms cannot be met
headroom = 0.25              # part of ttft_ms that admission leaves unused; default 0

[classes.batch]              # no targets: best effort
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

PacingName = Literal["gap", "paced"]
WhenInfeasibleName = Literal["refuse", "degrade", "wait"]

MAX_CLASSES = 64
"""Classes of one file: each is a label of metrics."""

MAX_TARGET_MS = 86_400_000.0
"""The largest target: one day."""

MAX_LATE_SHARE = 0.01
"""Share of the tokens of an answer that may be late if its request met its targets: frontend, load generator and
simulation judge alike."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FIELDS = ("ttft_ms", "inter_token_ms", "tokens_per_second", "weight", "pacing", "when_infeasible", "headroom")


class ServiceClassError(ValueError):
    """A file of service classes that cannot be used: one line that names the file, the field and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class. Without `ttft_s` and `inter_token_s` its requests are best effort.

    Attributes:
        name: letters, digits, `_`, `.` and `-`; at most 64.
        ttft_s: seconds from the arrival to the first token; None: no target.
        inter_token_s: seconds between tokens; None: no target.
        weight: value of meeting the targets of one request, relative to other classes.
        pacing: how gaps between tokens are judged, as `engine.core.latency.targets.Pacing`.
        when_infeasible: what happens if `ttft_s` cannot be met, as `engine.core.latency.targets.WhenInfeasible`.
        headroom: part of `ttft_s` that admission leaves unused, from 0 to below 1.
    """

    name: str
    ttft_s: float | None = None
    inter_token_s: float | None = None
    weight: float = 1.0
    pacing: PacingName = "gap"
    when_infeasible: WhenInfeasibleName = "wait"
    headroom: float = 0.0

    @property
    def has_targets(self) -> bool:
        """Whether there is a target to meet."""
        return self.ttft_s is not None or self.inter_token_s is not None


def read_service_classes(path: Path) -> dict[str, ServiceClass]:
    """Returns the classes of a file by name, in the order of the file.

    Raises: ServiceClassError: the file cannot be read, or see `parse_service_classes`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ServiceClassError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ServiceClassError(f"{path}: not UTF-8 at byte {error.start}") from error
    return parse_service_classes(text, str(path))


def parse_service_classes(text: str, source: str) -> dict[str, ServiceClass]:
    """Returns the classes of a TOML text by name, in the order of the text.

    Args:
        text: see the module's docstring.
        source: name of the text, for errors.

    Raises: ServiceClassError: it is not TOML, has no class or too many, or a field is unknown or out of range.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ServiceClassError(f"{source}: {error}") from error
    for key in content:
        if key != "classes":
            raise ServiceClassError(f"{source}: unknown field {key!r}; the file has only tables [classes.NAME]")
    classes = content.get("classes")
    if not isinstance(classes, dict) or not classes:
        raise ServiceClassError(f"{source}: there is no table [classes.NAME]")
    if len(classes) > MAX_CLASSES:
        raise ServiceClassError(f"{source}: {len(classes)} classes, at most {MAX_CLASSES} are allowed")
    return {name: _service_class(name, fields, source) for name, fields in classes.items()}


def _service_class(name: str, fields: object, source: str) -> ServiceClass:
    if not _NAME.fullmatch(name):
        raise ServiceClassError(
            f"{source}: class name {name!r} must have 1 to 64 letters, digits, '_', '.' or '-', the first one a letter "
            "or digit"
        )
    table = f"{source}: [classes.{name}]"
    if not isinstance(fields, dict):
        raise ServiceClassError(f"{table} must be a table")
    for key in fields:
        if key not in _FIELDS:
            raise ServiceClassError(f"{table} has an unknown field {key!r}; it may have {', '.join(_FIELDS)}")
    ttft_ms = _number(fields, "ttft_ms", table, MAX_TARGET_MS)
    inter_token_ms = _number(fields, "inter_token_ms", table, MAX_TARGET_MS)
    tokens_per_second = _number(fields, "tokens_per_second", table, 1e6)
    if inter_token_ms is not None and tokens_per_second is not None:
        raise ServiceClassError(f"{table} has both inter_token_ms and tokens_per_second; one says the other")
    if tokens_per_second is not None:
        inter_token_ms = 1e3 / tokens_per_second
    weight = _number(fields, "weight", table, 1e6)
    headroom = fields.get("headroom", 0.0)
    if not _is_number(headroom) or not 0 <= headroom < 1:
        raise ServiceClassError(f"{table} headroom is {headroom!r}; it must be a number from 0 to below 1")
    pacing = _choice(fields, "pacing", table, get_args(PacingName), "gap")
    when_infeasible = _choice(fields, "when_infeasible", table, get_args(WhenInfeasibleName), "wait")
    if ttft_ms is None:
        for key in ("when_infeasible", "headroom"):
            if key in fields:
                raise ServiceClassError(f"{table} has {key} without ttft_ms, to which it applies")
    if inter_token_ms is None and "pacing" in fields:
        raise ServiceClassError(f"{table} has pacing without inter_token_ms or tokens_per_second, to which it applies")
    return ServiceClass(
        name=name,
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        inter_token_s=None if inter_token_ms is None else inter_token_ms / 1e3,
        weight=1.0 if weight is None else weight,
        pacing=cast(PacingName, pacing),
        when_infeasible=cast(WhenInfeasibleName, when_infeasible),
        headroom=float(headroom),
    )


def _number(fields: Mapping[str, object], key: str, table: str, maximum: float) -> float | None:
    """Returns a field above 0; None if it is not there."""
    value = fields.get(key)
    if value is None:
        return None
    if not _is_number(value) or not 0 < cast(float, value) <= maximum:
        raise ServiceClassError(f"{table} {key} is {value!r}; it must be a number above 0 and at most {maximum:.10g}")
    return float(cast(float, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _choice(fields: Mapping[str, object], key: str, table: str, allowed: tuple[str, ...], default: str) -> str:
    value = fields.get(key, default)
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(repr(name) for name in allowed)
        raise ServiceClassError(f"{table} {key} is {value!r}; it must be one of {listed}")
    return value
