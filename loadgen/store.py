"""A run on disk, in a folder, in forms other programs read.

run.json            settings, errors, what the workload was, the digests of the other two files; written last
records.jsonl.gz    one line per request: what was planned, what happened, when each message came
workers.jsonl.gz    one line per worker: how late its event loop was, how much CPU it used

In a record, `status` is a name, times are nanoseconds from the start of the run, and what was absent is left out.
`chunk_ns` holds the time of the first message and then the gaps; `chunk_tokens` one number where all messages had as
many, else one each. `chunk_tokens` counts what the messages said, before the server's own count is taken into account.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.atomic_file import atomic_file, writing_to
from loadgen.errors import ResultError
from loadgen.plain_json import plain, to_json
from loadgen.record import ABSENT, CHUNK, REQUEST, RunData, Status, WorkerHealth, new_requests
from loadgen.trace.schema import Accounting, Blocks, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

RUN, RECORDS, WORKERS = "run.json", "records.jsonl.gz", "workers.jsonl.gz"
_SCHEMA = "loadgen.run/v1"
_TIMES = tuple(name for name in REQUEST.names or () if name != "status")


def save(run: RunData, folder: Path) -> None:
    """Writes a run; a file that is there already is replaced when the new one is whole.

    Raises: ResultError: the folder cannot be written, or the disk is full; names it.
    """
    with writing_to(folder):
        digests = {
            RECORDS: _write_lines(folder / RECORDS, _records(run)),
            WORKERS: _write_lines(folder / WORKERS, (plain(worker) for worker in run.workers)),
        }
        trace = run.workload
        head = {
            "schema": _SCHEMA,
            "settings": run.settings,
            "interrupted": run.interrupted,
            "ended_s": run.ended_s,
            "requests": len(run.requests),
            "chunks": len(run.chunks),
            "errors": run.errors,
            "workload": {
                "name": trace.name,
                "format": trace.format,
                "digest": trace.digest,
                "read": trace.accounting.read,
                "dropped": trace.accounting.dropped,
                "altered": trace.accounting.altered,
                "speed": trace.speed,
                "block_tokens": None if trace.blocks is None else trace.blocks.block_tokens,
                "has_sessions": trace.sessions is not None,
            },
            "server_metrics": run.server_metrics,
            "sha256": digests,
        }
        with atomic_file(folder / RUN) as file:
            file.write(to_json(head, indent=1).encode() + b"\n")


def load(folder: Path) -> RunData:
    """Reads a run; its messages come back in the order of worker, time and request.

    Raises: ResultError: there is no run, or it is not whole; names the folder and what is wrong.
    """
    if not (folder / RUN).is_file():
        raise ResultError(f"{folder}: holds no run ({RUN} is missing): name a folder that a run was written to")
    try:
        head = json.loads((folder / RUN).read_bytes())
        if head["schema"] != _SCHEMA:
            raise ResultError(f"{folder}: {RUN} says {head['schema']!r}, this program reads {_SCHEMA!r}")
        return _run_of(head, folder)
    except (OSError, EOFError, zlib.error, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ResultError(f"{folder}: the run is damaged: {type(error).__name__}: {error}; run it again") from error


def _records(run: RunData) -> Iterator[dict[str, Any]]:
    trace = run.workload
    chunks = run.chunks[np.argsort(run.chunks["request"], kind="stable")]
    starts = np.searchsorted(chunks["request"], np.arange(len(run.requests) + 1)).tolist()
    tokens, arrived = chunks["tokens"], chunks["arrived_ns"]
    columns = {name: run.requests[name].tolist() for name in _TIMES}
    planned = zip(
        trace.rows.tolist(),
        trace.arrival_s.tolist(),
        trace.input_tokens.tolist(),
        trace.output_tokens.tolist(),
        run.requests["status"].tolist(),
        strict=True,
    )
    for index, (row, arrival_s, input_tokens, output_tokens, status) in enumerate(planned):
        record = {
            "index": index,
            "trace_row": row,
            "arrival_s": arrival_s,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "status": Status(status).name,
        }
        record.update({name: values[index] for name, values in columns.items() if values[index] != ABSENT})
        if trace.sessions is not None:
            record["session"] = int(trace.sessions[index])
        if trace.blocks is not None:
            record["blocks"] = trace.blocks.of(index).tolist()
        low, high = starts[index], starts[index + 1]
        if low < high:
            record["chunk_ns"] = np.diff(arrived[low:high], prepend=0).tolist()
            same = (tokens[low:high] == tokens[low]).all()
            record["chunk_tokens"] = int(tokens[low]) if same else tokens[low:high].tolist()
        yield record


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Writes one JSON object per line, compressed; returns the SHA-256 of the text."""
    digest = hashlib.sha256()
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    # Level 1: 20,000 answers of 200 messages take 3 s and 19 MB; level 6 takes 7 s for 18 MB.
    with (
        atomic_file(path) as file,
        gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as packed,
    ):
        for row in rows:
            line = encode(row).encode() + b"\n"
            digest.update(line)
            packed.write(line)
    return digest.hexdigest()


def _read_lines(folder: Path, name: str, expected: str) -> Iterator[dict[str, Any]]:
    digest = hashlib.sha256()
    with gzip.open(folder / name, "rb") as file:
        for line in file:
            digest.update(line)
            yield json.loads(line)
    if digest.hexdigest() != expected:
        raise ValueError(f"{name} is not the one {RUN} was written with")


def _run_of(head: Mapping[str, Any], folder: Path) -> RunData:
    about = head["workload"]
    requests = new_requests(head["requests"])
    chunks = np.zeros(head["chunks"], dtype=CHUNK)
    columns: dict[str, list[Any]] = {name: [] for name in ("trace_row", "arrival_s", "input_tokens", "output_tokens")}
    sessions, blocks, used = [], [], 0
    for index, record in enumerate(_read_lines(folder, RECORDS, head["sha256"][RECORDS])):
        row = requests[index]
        row["status"] = Status[record["status"]]
        for name in _TIMES:
            if name in record:
                row[name] = record[name]
        for name, values in columns.items():
            values.append(record[name])
        sessions.append(record.get("session", -1))
        blocks.append(np.array(record.get("blocks", ()), dtype=np.int64))
        gaps = record.get("chunk_ns", ())
        part = chunks[used : used + len(gaps)]
        part["request"], part["arrived_ns"] = index, np.cumsum(gaps)
        part["tokens"] = record.get("chunk_tokens", 0)
        used += len(gaps)
    if len(columns["trace_row"]) != len(requests) or used != len(chunks):
        raise ValueError(f"{RECORDS} has {len(columns['trace_row'])} of {len(requests)} requests")
    server_metrics = head["server_metrics"]
    return RunData(
        workload=Trace(
            name=about["name"],
            format=about["format"],
            digest=about["digest"],
            arrival_s=np.array(columns["arrival_s"], dtype=np.float64),
            input_tokens=np.array(columns["input_tokens"], dtype=np.int64),
            output_tokens=np.array(columns["output_tokens"], dtype=np.int64),
            rows=np.array(columns["trace_row"], dtype=np.int64),
            accounting=Accounting(about["read"], about["dropped"], about["altered"]),
            blocks=_blocks(blocks, about["block_tokens"]),
            sessions=np.array(sessions, dtype=np.int64) if about["has_sessions"] else None,
            speed=about["speed"],
        ),
        requests=requests,
        chunks=in_order(chunks, requests),
        errors=tuple(head["errors"]),
        workers=tuple(_health(row) for row in _read_lines(folder, WORKERS, head["sha256"][WORKERS])),
        ended_s=head["ended_s"],
        interrupted=head["interrupted"],
        settings=head["settings"],
        server_metrics=None if server_metrics is None else (server_metrics[0], server_metrics[1]),
    )


def _blocks(rows: "list[NDArray[np.int64]]", block_tokens: int | None) -> Blocks | None:
    if block_tokens is None:
        return None
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return Blocks(np.concatenate([np.zeros(0, dtype=np.int64), *rows]), offsets, block_tokens)


def _health(row: Mapping[str, Any]) -> WorkerHealth:
    return WorkerHealth(
        worker=row["worker"],
        loop_lag_ms=np.array(row["loop_lag_ms"], dtype=np.float64),
        cpu_share=np.array(row["cpu_share"], dtype=np.float64),
        chunks_lost=row["chunks_lost"],
        exit_code=row["exit_code"],
    )


def in_order(chunks: "NDArray[Any]", requests: "NDArray[Any]") -> "NDArray[Any]":
    """Messages by worker, then time, then request: as `load` gives them."""
    workers = requests["worker"][chunks["request"]]
    return chunks[np.lexsort((chunks["request"], chunks["arrived_ns"], workers))]
