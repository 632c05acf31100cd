"""Published traces with one row per request: Azure, Mooncake, BurstGPT and Qwen-Bailian.

Azure (2023 and 2024; Patel et al., "Splitwise", ISCA 2024; CC-BY-4.0): CSV. Its wall clock has up to nine fractional
digits (2023 has seven: 100 ns). It is read in whole nanoseconds and counted from the first row, so that no digit is
lost.

Mooncake (FAST'25): JSON lines with one hash id per 512-token block. Equal ids mean equal prefixes up to the end of the
block, so the ids say exactly what prompts share. The published clocks tick once in three seconds: see
`loadgen.trace.window.dequantize`.

BurstGPT (Wang et al., arXiv:2401.17644; CC-BY-4.0): CSV, whose columns are found by name because BurstGPT_3 has two
more in the middle. Rows without prompt or answer tokens are requests that failed: they are left out and counted.

Qwen-Bailian (ATC'25): as Mooncake, with seconds, 16-token blocks, and conversations: `chat_id` and `parent_chat_id`
chain the turns, the first turn has parent -1. The session of a request is the chat_id at the root of its chain, or the
oldest known parent where the chain begins before the file does.
"""

import re
from datetime import datetime, timedelta

from loadgen.trace.formats import (
    MAX_TOKENS,
    LeftOut,
    MalformedRowError,
    Parser,
    ReadOptions,
    Record,
    Row,
    RowFormat,
    block_ids,
    real_number,
    tokens,
    whole_number,
)

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?", re.ASCII)


def _azure_parser(_: ReadOptions) -> Parser:
    origin_ns: int | None = None

    def parse(record: Record) -> Row:
        nonlocal origin_ns
        now_ns = _nanoseconds(record["TIMESTAMP"])
        input_tokens, output_tokens = tokens(record, "ContextTokens"), tokens(record, "GeneratedTokens")
        if origin_ns is None:  # not before: a malformed row is left out, and is not the first
            origin_ns = now_ns
        return Row((now_ns - origin_ns) / 1e9, input_tokens, output_tokens)

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


def _hashed_row(record: Record, block_tokens: int, ticks_per_s: float, session: int | None = None) -> Row:
    """A row of Mooncake or Bailian."""
    input_tokens = tokens(record, "input_length")
    return Row(
        arrival_s=real_number(record, "timestamp") / ticks_per_s,
        input_tokens=input_tokens,
        output_tokens=tokens(record, "output_length"),
        blocks=block_ids(record, "hash_ids", input_tokens, block_tokens),
        block_tokens=block_tokens,
        session=session,
    )


def _bailian_parser(_: ReadOptions) -> Parser:
    root_of: dict[int, int] = {}

    def parse(record: Record) -> Row:
        chat = whole_number(record, "chat_id", low=0)
        parent = whole_number(record, "parent_chat_id", low=-1)
        session = chat if parent == -1 else root_of.get(parent, parent)
        row = _hashed_row(record, 16, 1, session)
        root_of[chat] = session
        return row

    return parse


def _burstgpt_parser(options: ReadOptions) -> Parser:
    def parse(record: Record) -> Row | LeftOut:
        arrival_s = real_number(record, "Timestamp")
        input_tokens = whole_number(record, "Request tokens", low=0, high=MAX_TOKENS)
        output_tokens = whole_number(record, "Response tokens", low=0, high=MAX_TOKENS)
        if options.model and record["Model"] != options.model:
            return LeftOut(f"of another model than {options.model}")
        if output_tokens == 0:
            return LeftOut("failed: 0 response tokens")
        if input_tokens == 0:
            return LeftOut("0 request tokens")
        return Row(arrival_s, input_tokens, output_tokens, session=record.get("Session ID") or None)

    return parse


AZURE = RowFormat(
    name="azure",
    description="Azure 2023 or 2024: CSV with TIMESTAMP,ContextTokens,GeneratedTokens",
    kind="csv",
    required=frozenset(("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    new_parser=_azure_parser,
    counts_from_first=True,
)
MOONCAKE = RowFormat(
    name="mooncake",
    description="Mooncake: JSON lines with timestamp (ms), input_length, output_length, hash_ids (512 tokens each)",
    kind="jsonl",
    required=frozenset(("timestamp", "input_length", "output_length", "hash_ids")),
    new_parser=lambda _: lambda record: _hashed_row(record, 512, 1e3),
)
BURSTGPT = RowFormat(
    name="burstgpt",
    description="BurstGPT: CSV with Timestamp (s), Model, Request tokens, Response tokens",
    kind="csv",
    required=frozenset(("Timestamp", "Model", "Request tokens", "Response tokens")),
    new_parser=_burstgpt_parser,
)
BAILIAN = RowFormat(
    name="bailian",
    description="Qwen-Bailian: JSON lines with chat_id, parent_chat_id, timestamp (s), input_length, output_length, "
    "hash_ids (16 tokens each)",
    kind="jsonl",
    required=frozenset(("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")),
    new_parser=_bailian_parser,
)
