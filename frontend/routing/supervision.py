"""What an engine's supervisor tells the frontends that use it: whether it is about to restart it, and why it ended.

The supervisor (`frontend/cli/engine_process.py`) writes a small file beside the engine's unix socket; the engine link
reads it when a request has lost its engine or has waited too long. A file, because frontends may be other processes.
Times are those of time.monotonic(), which all processes of a machine share.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol


class EngineEnd(Enum):
    """Why an engine ended."""

    KILLED = "killed"  # SIGKILL from outside, and not for want of memory: no request is the cause
    FAILED = "failed"  # any other reason


@dataclass(frozen=True, slots=True)
class SupervisorNote:
    """The content of the file.

    Attributes:
        restart_until_s: until when a restart was, or is, to be expected; 0.0: none was yet.
        ends: of the last engines that served, by instance id.
    """

    restart_until_s: float = 0.0
    ends: Mapping[str, EngineEnd] = field(default_factory=dict)


class Supervision(Protocol):
    """What is known about restarts of engines."""

    def restart_until_s(self) -> float:
        """Until when a restart was, or is, to be expected; time.monotonic()."""
        ...

    def end_of(self, instance_id: str) -> EngineEnd | None:
        """Why an engine that has been lost has ended; None: that is not known yet."""
        ...


class Unsupervised:
    """No supervisor is known."""

    def restart_until_s(self) -> float:
        """Nothing is to be expected."""
        return 0.0

    def end_of(self, instance_id: str) -> EngineEnd | None:  # noqa: ARG002 - see Supervision
        """Without evidence a loss counts as a failure."""
        return EngineEnd.FAILED


def note_path(socket: Path) -> Path:
    """Where the note about the engine at this socket is."""
    return socket.with_name(f"{socket.name}.supervisor")


def write_note(path: Path, note: SupervisorNote) -> None:
    """Replaces the note.

    Raises:
        OSError: the folder is gone or full.
    """
    ends = {instance_id: end.value for instance_id, end in note.ends.items()}
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"restart_until_s": note.restart_until_s, "ends": ends}))
    os.replace(new, path)  # noqa: PTH105 - readers see the old note or the new one, never half of one


def read_note(path: Path) -> SupervisorNote | None:
    """Reads the note; None: nobody supervises this engine, or not in a way that can be read."""
    try:
        fields = json.loads(path.read_text())
        ends = {instance_id: EngineEnd(end) for instance_id, end in fields["ends"].items()}
        return SupervisorNote(float(fields["restart_until_s"]), ends)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
