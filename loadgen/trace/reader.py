"""Reads a trace of any known format: finds out which, checks every row, accounts for every row.

| format     | what it is                        | clock              | shared prefixes  | sessions   |
|------------|-----------------------------------|--------------------|------------------|------------|
| `azure`    | CSV, Azure 2023 and 2024          | wall clock, 100 ns | unknown          | unknown    |
| `mooncake` | JSON lines, FAST'25               | ms, ticks of 3 s   | 512-token blocks | unknown    |
| `burstgpt` | CSV, failed requests are left out | s                  | unknown          | third file |
| `bailian`  | JSON lines                        | s                  | 16-token blocks  | yes        |
| `servegen` | a model of traffic: sampled       | s                  | unknown          | unknown    |
| `jsonl`    | our own (`loadgen.trace.jsonl`)   | s                  | any              | any        |
"""

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import OptionError, TraceError
from loadgen.trace import jsonl, servegen
from loadgen.trace.formats import LeftOut, MalformedRowError, ReadOptions, Row, RowFormat
from loadgen.trace.published import AZURE, BAILIAN, BURSTGPT, MOONCAKE
from loadgen.trace.records import Records, open_records
from loadgen.trace.schema import Accounting, Blocks, Trace, workload_digest

_ROW_FORMATS = (AZURE, MOONCAKE, BURSTGPT, BAILIAN, jsonl.FORMAT)
FORMATS = ("auto", *(form.name for form in _ROW_FORMATS), servegen.NAME)
_DEFAULTS = ReadOptions()
_LATEST_S = 3e10


def read_trace(path: Path, *, format: str = "auto", options: ReadOptions = _DEFAULTS) -> Trace:  # noqa: A002
    """Reads a trace.

    The digest of what comes back is that of the requests themselves, whatever form or compression they came in.

    Args:
        path: a file, compressed or not; for `servegen` its arrivals or a folder as that project publishes it.
        format: one of FORMATS; "auto" tells it by the names in the first line.
        options: see ReadOptions.

    Returns: at least one request; arrivals on the file's own clock, azure's counted from its first request.

    Raises:
        TraceError: the file cannot be read, is of no known format, has a malformed row (names the line), runs
            backwards, or holds no request.
        OptionError: there is no such format, or it knows no models to choose from.
    """
    if format not in FORMATS:
        raise OptionError(f"trace format {format!r} is unknown; there are {', '.join(FORMATS)}")
    trace = None if path.is_dir() or format == servegen.NAME else _read_file(path, format, options)
    if trace is None:
        trace = servegen.read(path, options)
    return replace(trace, digest=workload_digest(trace))


def _read_file(path: Path, name: str, options: ReadOptions) -> Trace | None:
    """None for a file of a servegen model."""
    with open_records(path) as records:
        if name == "auto" and servegen.recognises(records.names):
            return None
        form = _detect(records) if name == "auto" else _demand(records, name)
        if options.model and form is not BURSTGPT:
            raise OptionError(f"--trace-model {options.model}: {path} is of format {form.name}, which names no models")
        return _read_rows(path.name, records, form, options)


def _detect(records: Records) -> RowFormat:
    names = frozenset(records.names)
    fitting = [form for form in _ROW_FORMATS if form.kind == records.kind and form.required <= names]
    if not fitting:
        known = "\n".join(f"  {text}" for text in (*(form.description for form in _ROW_FORMATS), servegen.DESCRIPTION))
        found = f"a {records.kind} file with {', '.join(records.names) or 'nothing readable in its first line'}"
        raise TraceError(f"of no known format: {found[:200]}. Known are\n{known}")
    return max(fitting, key=lambda form: len(form.required))


def _demand(records: Records, name: str) -> RowFormat:
    form = next(form for form in _ROW_FORMATS if form.name == name)
    missing = form.required - set(records.names) if records.names else ()  # a broken first line complains itself
    if form.kind != records.kind or missing:
        what = f"a {records.kind} file" if form.kind != records.kind else f"without {', '.join(sorted(missing))}"
        raise TraceError(f"not of format {name}: {what}; expected {form.description}")
    return form


def _read_rows(name: str, records: Records, form: RowFormat, options: ReadOptions) -> Trace:
    parse = form.new_parser(options)
    columns = _Columns()
    for line, record in records:
        try:
            if isinstance(record, MalformedRowError):
                raise record
            answer = parse(record)
            columns.add(line, answer)
        except MalformedRowError as error:
            if not options.skip_malformed:
                raise TraceError(f"line {line}: {error.detail}; --skip-malformed leaves such rows out") from None
            columns.leave_out(f"malformed: {error.field}")
    return columns.trace(name, form, sort=options.sort)


class _Columns:
    """A trace under construction."""

    def __init__(self) -> None:
        self._read = 0
        self._dropped: dict[str, int] = {}
        self._arrivals = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._rows = array("q")
        self._lines = array("q")
        self._block_ids = array("q")
        self._block_ends = array("q", [0])
        self._block_tokens: int | None = None
        self._sessions: list[int | str | None] = []

    def add(self, line: int, answer: Row | LeftOut) -> None:
        if isinstance(answer, LeftOut):
            self.leave_out(answer.reason)
            return
        if abs(answer.arrival_s) > _LATEST_S:
            raise MalformedRowError("arrival", f"arrives at {answer.arrival_s:g} s, a thousand years off: not seconds?")
        if self._block_tokens not in (None, answer.block_tokens):
            raise MalformedRowError(
                "blocks", f"blocks of {answer.block_tokens} tokens, those of the rows above have {self._block_tokens}"
            )
        self._block_tokens = answer.block_tokens
        self._arrivals.append(answer.arrival_s)
        self._inputs.append(answer.input_tokens)
        self._outputs.append(answer.output_tokens)
        self._rows.append(self._read)
        self._lines.append(line)
        self._block_ids.extend(answer.blocks)
        self._block_ends.append(len(self._block_ids))
        self._sessions.append(answer.session)
        self._read += 1

    def leave_out(self, reason: str) -> None:
        self._dropped[reason] = self._dropped.get(reason, 0) + 1
        self._read += 1

    def trace(self, name: str, form: RowFormat, *, sort: bool) -> Trace:
        count = len(self._arrivals)
        accounting = Accounting(self._read, self._dropped)
        assert accounting.kept == count, f"{accounting} accounts for {accounting.kept} rows, {count} were kept"
        if count == 0:
            reasons = ", ".join(f"{number} {reason}" for reason, number in self._dropped.items())
            raise TraceError(f"no requests in {self._read} rows{': ' if reasons else ''}{reasons}")
        blocks = None
        if self._block_tokens:
            ids = np.array(self._block_ids, dtype=np.int64)
            blocks = Blocks(ids, np.array(self._block_ends, dtype=np.int64), self._block_tokens)
        trace = Trace(
            name=name,
            format=form.name,
            digest="",
            arrival_s=np.array(self._arrivals, dtype=np.float64),
            input_tokens=np.array(self._inputs, dtype=np.int64),
            output_tokens=np.array(self._outputs, dtype=np.int64),
            rows=np.array(self._rows, dtype=np.int64),
            accounting=accounting,
            blocks=blocks,
            sessions=_numbered(self._sessions),
        )
        backwards = np.flatnonzero(np.diff(trace.arrival_s) < 0) + 1
        if len(backwards) == 0:
            return trace
        if not sort:
            at = int(backwards[0])
            raise TraceError(
                f"line {self._lines[at]}: arrives at {trace.arrival_s[at]:.9g} s, before the request above it at "
                f"{trace.arrival_s[at - 1]:.9g} s ({len(backwards)} such rows); --sort puts them in order"
            )
        ordered = trace.take(np.argsort(trace.arrival_s, kind="stable"), "")
        accounting = accounting.alter("sorted: arrived before the row above", len(backwards))
        start_s = ordered.arrival_s[0] if form.counts_from_first else 0.0
        return replace(ordered, arrival_s=ordered.arrival_s - start_s, accounting=accounting)


def _numbered(sessions: list[int | str | None]) -> NDArray[np.int64] | None:
    """Conversations as numbers: as they are, or in order of appearance if any of them is a text; -1 for none."""
    if all(session is None for session in sessions):
        return None
    if not any(isinstance(session, str) for session in sessions):
        return np.array([-1 if session is None else session for session in sessions], dtype=np.int64)
    numbers: dict[int | str | None, int] = {None: -1}
    return np.array([numbers.setdefault(session, len(numbers) - 1) for session in sessions], dtype=np.int64)
