"""Azure's traces of LLM inference, 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

The clock is a wall clock with up to nine fractional digits (2023 has seven: 100 ns), read in whole nanoseconds and
counted from the first row, so that no digit is lost. Neither sessions nor shared prefixes are known. CC-BY-4.0, Patel
et al., "Splitwise", ISCA 2024.
"""

import re
from datetime import datetime, timedelta

from loadgen.trace.formats import MalformedRowError, Parser, ReadOptions, Record, Row, RowFormat, tokens

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?", re.ASCII)


def _new_parser(_: ReadOptions) -> Parser:
    origin_ns: int | None = None

    def parse(record: Record) -> Row:
        nonlocal origin_ns
        now_ns = _nanoseconds(record["TIMESTAMP"])
        if origin_ns is None:
            origin_ns = now_ns
        arrival_s = (now_ns - origin_ns) / 1e9
        return Row(arrival_s, tokens(record, "ContextTokens"), tokens(record, "GeneratedTokens"))

    return parse


def _nanoseconds(text: str) -> int:
    match = _TIMESTAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        since = datetime.fromisoformat(match[1]) - datetime(1970, 1, 1)
    except ValueError:
        raise MalformedRowError("TIMESTAMP", f"TIMESTAMP is {text[:40]!r}, not YYYY-MM-DD HH:MM:SS.fffffff") from None
    return since // timedelta(seconds=1) * 10**9 + int((match[2] or "0").ljust(9, "0"))


FORMAT = RowFormat(
    name="azure",
    description="Azure 2023 or 2024: CSV with TIMESTAMP,ContextTokens,GeneratedTokens",
    kind="csv",
    required=frozenset(("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    new_parser=_new_parser,
)
