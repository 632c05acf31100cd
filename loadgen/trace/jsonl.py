"""Our own trace format: JSON lines, one object per request. Every other format can be converted to it.

| name            | what                                                                                             |
|-----------------|--------------------------------------------------------------------------------------------------|
| `arrival_s`     | seconds, ascending; may be missing in a data set whose schedule is made up (`run`)               |
| `input_tokens`  | length of the prompt, at least 1                                                                 |
| `output_tokens` | length of the answer, at least 1                                                                 |
| `blocks`        | ids of the prompt's blocks, one for every `block_tokens` tokens begun; equal ids at equal places |
|                 | from the start are a shared prefix. In all rows or in none                                       |
| `block_tokens`  | tokens of a whole block, the same in every row                                                   |
| `session`       | the conversation: a number or a text; may be missing                                             |

Other names are read past.
"""

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from loadgen.atomic_file import atomic_file
from loadgen.errors import ResultError
from loadgen.trace.formats import (
    MAX_TOKENS,
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
from loadgen.trace.schema import Trace


def _new_parser(options: ReadOptions) -> Parser:
    def parse(record: Record) -> Row:
        input_tokens = tokens(record, "input_tokens")
        block_tokens = 0
        if "blocks" in record or "block_tokens" in record:
            block_tokens = whole_number(record, "block_tokens", low=1, high=MAX_TOKENS)
        untimed = not options.timed and "arrival_s" not in record
        return Row(
            arrival_s=0.0 if untimed else real_number(record, "arrival_s"),
            input_tokens=input_tokens,
            output_tokens=tokens(record, "output_tokens"),
            blocks=block_ids(record, "blocks", input_tokens, block_tokens) if block_tokens else (),
            block_tokens=block_tokens,
            session=_session(record),
        )

    return parse


def _session(record: Record) -> int | str | None:
    session = record.get("session")
    if session is None or (isinstance(session, str) and session):
        return session
    if isinstance(session, str):
        raise MalformedRowError("session", "session is an empty text; leave it out")
    return whole_number(record, "session", low=0)


FORMAT = RowFormat(
    name="jsonl",
    description="jsonl: JSON lines with arrival_s, input_tokens, output_tokens and, if known, blocks, block_tokens, "
    "session",
    kind="jsonl",
    required=frozenset(("input_tokens", "output_tokens")),
    new_parser=_new_parser,
)


def write_jsonl(trace: Trace, path: Path) -> None:
    """Writes a trace in this form, compressed if the name ends in `.gz`; an existing file is replaced at the end.

    Raises: ResultError: it cannot be written.
    """
    try:
        with atomic_file(path) as raw:
            # Without name and time in the header, the same trace gives the same file.
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.name.endswith(".gz") else nullcontext(raw)
            with packed as file:
                for index in range(len(trace)):
                    file.write(json.dumps(_as_record(trace, index)).encode() + b"\n")
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}") from error


def _as_record(trace: Trace, index: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "arrival_s": float(trace.arrival_s[index]),
        "input_tokens": int(trace.input_tokens[index]),
        "output_tokens": int(trace.output_tokens[index]),
    }
    if trace.sessions is not None and trace.sessions[index] >= 0:
        record["session"] = int(trace.sessions[index])
    if trace.blocks is not None:
        record |= {"block_tokens": trace.blocks.block_tokens, "blocks": trace.blocks.of(index).tolist()}
    return record
