"""Measuring limits of this host, as found by `calibrate`; stored between runs, one entry per protocol."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from loadgen.atomic_file import atomic_file, writing_to
from loadgen.target.base import Api

_FILE = Path("chairlift", "loadgen-ceiling.json")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The measuring limits of a host.

    Attributes:
        protocol: "grpc" or "http".
        messages_per_s: that all workers together received from mock servers on the same host.
        messages_per_s_per_worker: the same of one worker alone.
        num_workers: that were used for the first figure.
        null_messages_per_s: that one worker records without a server (`null:`).
        ttft_error_ms, itl_error_ms, tpot_error_ms: median measured minus true, at a tenth of the ceiling or less.
        host, num_cpus, python: where it was found; another host's figure is not used.
        found_at: ISO 8601.
    """

    protocol: str
    messages_per_s: float
    messages_per_s_per_worker: float
    num_workers: int
    null_messages_per_s: float
    ttft_error_ms: float
    itl_error_ms: float
    tpot_error_ms: float
    host: str
    num_cpus: int
    python: str
    found_at: str

    def of(self, num_workers: int) -> float:
        """Returns the messages/s that this many workers can receive."""
        return num_workers * min(self.messages_per_s_per_worker, self.messages_per_s / self.num_workers)


def this_host() -> tuple[str, int, str]:
    """Returns name, usable cores and version of Python; a ceiling is valid only for these."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return platform.node(), cpus, platform.python_version()


def protocol_of(api: Api) -> str:
    """Returns the protocol whose ceiling applies to an API; "" for none."""
    return {"grpc": "grpc", "completions": "http", "chat": "http", "null": ""}[api]


def stored_ceiling(api: Api = "grpc") -> Ceiling | None:
    """Returns the result of `calibrate` on this host; None without one for this version of Python and these cores."""
    entry = _read().get(protocol_of(api))
    try:
        ceiling = Ceiling(**entry) if isinstance(entry, dict) else None
    except TypeError:  # written by another version
        return None
    if ceiling is None or (ceiling.host, ceiling.num_cpus, ceiling.python) != this_host():
        return None
    return ceiling


def store_ceiling(ceiling: Ceiling) -> Path:
    """Stores a ceiling in place of the older one of its protocol; returns the file.

    Raises: ResultError: it cannot be written.
    """
    path = ceiling_file()
    text = json.dumps({**_read(), ceiling.protocol: asdict(ceiling)}, indent=2)
    with writing_to(path.parent), atomic_file(path) as file:
        file.write(text.encode())
    return path


def ceiling_file() -> Path:
    """Returns the file of the stored ceilings."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / _FILE


def _read() -> dict[str, object]:
    try:
        kept = json.loads(ceiling_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
