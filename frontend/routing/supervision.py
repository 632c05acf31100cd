"""Notes from an engine's supervisor to frontends: whether it will restart the engine, and why the engine ended.

The supervisor (`frontend/cli/engine_process.py`) writes a small file beside the engine's unix socket. The failover
queue reads it when a request has lost its engine or has waited too long. It is a file because frontends may be other
processes. Times are values of time.monotonic(), which all processes of a machine share.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class EngineEnd(Enum):
    """Why an engine ended."""

    KILLED = "killed"  # SIGKILL from outside, without memory pressure: no request is the cause
    FAILED = "failed"  # any other reason


@dataclass(frozen=True, slots=True)
class SupervisorNote:
    """The content of the file.

    Attributes:
        restart_until_s: until when a restart was or is expected; 0.0 if never.
        ends: why the last engines ended, by instance id.
    """

    restart_until_s: float = 0.0
    ends: Mapping[str, EngineEnd] = field(default_factory=dict)


class SupervisorNotes:
    """Reads the notes of the engines on unix sockets.

    Args:
        addresses: returns the engines' addresses.
        is_serving: returns whether an engine serves.
    """

    def __init__(self, addresses: Callable[[], Iterable[str]], is_serving: Callable[[], bool]) -> None:
        self._addresses = addresses
        self._is_serving = is_serving

    def restart_until_s(self) -> float:
        """Returns until when a restart was or is expected; time.monotonic()."""
        return max((note.restart_until_s for note in self._notes()), default=0.0)

    def end_of(self, instance_id: str) -> EngineEnd | None:
        """Returns why a lost engine ended; None if this is not known yet.

        A supervisor notes an end before it starts the next engine. If an engine serves, an instance without a note has
        therefore not ended or has no supervisor; its loss then counts as a failure.
        """
        notes = self._notes()
        for note in notes:
            if instance_id in note.ends:
                return note.ends[instance_id]
        return None if notes and not self._is_serving() else EngineEnd.FAILED

    def _notes(self) -> list[SupervisorNote]:
        sockets = (Path(one.removeprefix("unix:")) for one in self._addresses() if one.startswith("unix:"))
        notes = (read_note(note_path(socket)) for socket in sockets)
        return [note for note in notes if note is not None]


def note_path(socket: Path) -> Path:
    """Returns the path of the note about the engine at this socket."""
    return socket.with_name(f"{socket.name}.supervisor")


def write_note(path: Path, note: SupervisorNote) -> None:
    """Replaces the note.

    Raises:
        OSError: the folder is gone or full.
    """
    ends = {instance_id: end.value for instance_id, end in note.ends.items()}
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"restart_until_s": note.restart_until_s, "ends": ends}))
    os.replace(new, path)  # noqa: PTH105 - atomic: readers see the old note or the new one


def read_note(path: Path) -> SupervisorNote | None:
    """Reads the note; returns None if there is none or it is unreadable."""
    try:
        fields = json.loads(path.read_text())
        ends = {instance_id: EngineEnd(end) for instance_id, end in fields["ends"].items()}
        return SupervisorNote(float(fields["restart_until_s"]), ends)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
