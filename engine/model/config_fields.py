"""Typed access to a JSON file of a checkpoint; errors name the file and the field."""

from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.model.checkpoint_file import read_json

REQUIRED = object()
"""Default of required fields."""

_MIN_NUMBER, _MAX_NUMBER = 2.0**-126, 2.0**128
"""Between these float32 holds a number in full precision."""

MAX_INTEGER = 2**31 - 1
"""Largest integer of the wire format and the kernels."""


class ConfigFields:
    """The fields of a JSON object; null counts as absent, except in `with_defaults`."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self._source = source
        self._nulls = {name for name, value in values.items() if value is None}
        self._values = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_file(cls, path: Path) -> "ConfigFields":
        """Reads a JSON object.

        Raises: CheckpointError: the file is missing, see `read_json`, or does not hold an object.
        """
        try:
            values = read_json(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; a checkpoint is a folder with config.json") from None
        return cls.from_json(str(path), values)

    @classmethod
    def from_json(cls, source: str, value: Any) -> "ConfigFields":
        """Takes a JSON value.

        Raises: CheckpointError: it is not an object.
        """
        if not isinstance(value, dict):
            raise CheckpointError(f"{source}: holds a {type(value).__name__}, expected an object")
        return cls(source, value)

    def with_defaults(self, defaults: dict[str, Any]) -> "ConfigFields":
        """Returns a copy with values for absent fields; a field that is null stays absent."""
        nulls = dict.fromkeys(self._nulls)
        return ConfigFields(self._source, {**defaults, **nulls, **self._values})

    def replaced(self, values: dict[str, Any]) -> "ConfigFields":
        """Returns a copy in which these fields have other values."""
        return ConfigFields(self._source, {**dict.fromkeys(self._nulls), **self._values, **values})

    def is_null(self, name: str) -> bool:
        """Whether the object has the field, and null as its value."""
        return name in self._nulls

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields, in their order."""
        return tuple(self._values)

    @property
    def values(self) -> dict[str, Any]:
        """The fields that are not null."""
        return dict(self._values)

    def with_nulls(self) -> dict[str, Any]:
        """Returns all fields; those that are null are None."""
        return {**dict.fromkeys(self._nulls), **self._values}

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns the error for an invalid field."""
        return CheckpointError(f"{self._source}: {name} {problem}")

    def raw(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the unchecked value."""
        value = self._values.get(name, default)
        if value is REQUIRED:
            raise self.error(name, "is missing")
        return value

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Returns an integer from minimum to maximum."""
        value = self.raw(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"is {value!r}, expected an integer >= {minimum}")
        if value > maximum:
            raise self.error(name, f"is {value}, the maximum is {maximum}")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """Returns a number > 0 that the kernels can compute with, in float32."""
        value = self.raw(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not _MIN_NUMBER <= value < _MAX_NUMBER:
            raise self.error(name, f"is {value!r}, expected a number > 0, of float32: 1.2e-38 to 3.4e38")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}, expected true or false")
        return value

    def section(self, name: str) -> "ConfigFields":
        """Returns a nested object; an empty one if absent."""
        value = self.raw(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r}, expected an object")
        return ConfigFields(f"{self._source}: {name}", value)

    def token_ids(self, name: str) -> frozenset[int]:
        """Returns one token id or a list of them as a set; an empty one if absent."""
        value = self.raw(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= MAX_INTEGER for i in ids):
            raise self.error(name, f"is {value!r}, expected a token id or a list of them")
        return frozenset(ids)
