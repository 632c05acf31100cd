"""Typed reading of a JSON file of a checkpoint, so that whatever is wrong in it is reported by file and field."""

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

REQUIRED = object()
"""Default of fields that must be there."""


class ConfigFields:
    """The fields of one JSON object; null counts as absent, as in `transformers`."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self._source = source
        self._values = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_file(cls, path: Path) -> "ConfigFields":
        """Reads a JSON object.

        Raises: CheckpointError: no such file, not JSON, or not an object.
        """
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; a checkpoint is a folder with config.json") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: holds a {type(values).__name__}, expected an object")
        return cls(str(path), values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are there, in their order."""
        return tuple(self._values)

    def error(self, name: str, problem: str) -> CheckpointError:
        """What to raise for a field that is wrong."""
        return CheckpointError(f"{self._source}: {name} {problem}")

    def raw(self, name: str, default: Any = REQUIRED) -> Any:
        """The value as it is."""
        value = self._values.get(name, default)
        if value is REQUIRED:
            raise self.error(name, "is missing")
        return value

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1) -> int:
        """A whole number >= minimum."""
        value = self.raw(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"is {value!r}, expected an integer >= {minimum}")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """A finite number > 0."""
        value = self.raw(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(name, f"is {value!r}, expected a number > 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}, expected true or false")
        return value

    def section(self, name: str) -> "ConfigFields":
        """A nested object; empty when absent."""
        value = self.raw(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r}, expected an object")
        return ConfigFields(f"{self._source}: {name}", value)

    def token_ids(self, name: str) -> frozenset[int]:
        """One token id or a list of them; empty when absent."""
        value = self.raw(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(name, f"is {value!r}, expected a token id or a list of them")
        return frozenset(ids)
