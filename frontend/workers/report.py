"""What a worker tells its parent: one JSON object per line on its standard output."""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import BinaryIO


class News(Enum):
    """What has happened."""

    LISTENING = "listening"
    SERVING = "serving"
    MISCONFIGURED = "misconfigured"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Report:
    """One line.

    Attributes:
        reason: of MISCONFIGURED: what must be changed.
        num_drained: of DRAINED: calls that finished by themselves.
    """

    news: News
    reason: str = ""
    num_drained: int = 0


def send(report: Report, out: BinaryIO) -> None:
    """Writes a line."""
    out.write(json.dumps(asdict(report), default=lambda news: news.value).encode() + b"\n")
    out.flush()


def parse(line: bytes) -> Report:
    """Reads a line."""
    fields = json.loads(line)
    return Report(News(fields["news"]), fields["reason"], fields["num_drained"])
