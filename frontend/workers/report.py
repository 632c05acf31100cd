"""Reports of a worker to its parent: one JSON object per line on its standard output."""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import BinaryIO


class News(Enum):
    """The event that a worker reports."""

    LISTENING = "listening"
    SERVING = "serving"
    MISCONFIGURED = "misconfigured"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Report:
    """One report.

    Attributes:
        news: the event.
        reason: with MISCONFIGURED: what must be changed.
        num_drained: with DRAINED: number of calls that finished.
    """

    news: News
    reason: str = ""
    num_drained: int = 0


def send(report: Report, out: BinaryIO) -> None:
    """Writes a report."""
    out.write(json.dumps(asdict(report), default=lambda news: news.value).encode() + b"\n")
    out.flush()


def parse(line: bytes) -> Report:
    """Parses a report."""
    fields = json.loads(line)
    return Report(News(fields["news"]), fields["reason"], fields["num_drained"])
