"""A trace, independent of its file's format: requests in order of arrival, in columns.

Pure: arrays in, arrays out. It knows neither files nor prompts. The same form is what a run runs: a trace that was cut
and scaled, its arrivals counted from the start of the run.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks that prompts share. Prompt i is the blocks ids[offsets[i]:offsets[i + 1]], the last one cut to its length.

    An id stands for the whole prefix up to the end of its block, as in Mooncake's traces: equal ids, equal prefixes.

    Attributes:
        ids: [blocks of all requests] int64.
        offsets: [requests + 1] int64.
        block_tokens: tokens of a whole block.
    """

    ids: "Integers"
    offsets: "Integers"
    block_tokens: int

    def of(self, index: int) -> "Integers":
        """The ids of one request's blocks."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def take(self, chosen: "Integers") -> "Blocks":
        """Those of the chosen requests, in that order."""
        rows = [self.of(int(index)) for index in chosen]
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
        ids = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        return Blocks(ids, offsets, self.block_tokens)


@dataclass(frozen=True, slots=True)
class Accounting:
    """What became of every row of a file: read == kept + all dropped.

    Attributes:
        read: rows of the file.
        dropped: how many were left out, by reason.
        altered: how many were changed, by what was done to them; later steps may have left some of those out.
    """

    read: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    altered: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Rows that are in the trace."""
        return self.read - sum(self.dropped.values())

    def drop(self, reason: str, count: int) -> "Accounting":
        """The same with `count` more left out."""
        return replace(self, dropped=_with(self.dropped, reason, count))

    def alter(self, change: str, count: int) -> "Accounting":
        """The same with `count` more changed."""
        return replace(self, altered=_with(self.altered, change, count))


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: of the file or the synthetic data set, for reports.
        format: such as "mooncake".
        digest: SHA-256 of the content as it was read, hexadecimal: the same after cutting and scaling. Prompts are
            derived from it.
        arrival_s: [requests] float64, seconds, ascending.
        input_tokens, output_tokens: [requests] int64, at least 1.
        rows: [requests] int64, each one's row in its file, from 0.
        blocks: what prompts share; None if the trace does not say.
        sessions: [requests] int64, the conversation each belongs to, -1 for none; None if the trace does not say.
        accounting: where every row of the file went.
        speed: how many times faster than it was recorded the trace is to be run.
    """

    name: str
    format: str
    digest: str
    arrival_s: "Floats"
    input_tokens: "Integers"
    output_tokens: "Integers"
    rows: "Integers"
    accounting: Accounting
    blocks: Blocks | None = None
    sessions: "Integers | None" = None
    speed: float = 1.0

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last; 0 with fewer than two requests."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def take(self, chosen: "Integers", reason: str) -> "Trace":
        """Only the chosen requests, in that order; the others count as dropped for this reason."""
        return replace(
            self,
            arrival_s=self.arrival_s[chosen],
            input_tokens=self.input_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            rows=self.rows[chosen],
            accounting=self.accounting.drop(reason, len(self) - len(chosen)),
            blocks=None if self.blocks is None else self.blocks.take(chosen),
            sessions=None if self.sessions is None else self.sessions[chosen],
        )


def _with(counts: Mapping[str, int], key: str, count: int) -> Mapping[str, int]:
    return {**counts, key: counts.get(key, 0) + count} if count else counts


def workload_digest(trace: Trace) -> str:
    """SHA-256 of a workload: schedule (to the microsecond), lengths and shared blocks. Equal digests, equal
    workloads: only then may two runs be compared.
    """
    digest = hashlib.sha256()
    columns = [np.round(trace.arrival_s * 1e6).astype(np.int64), trace.input_tokens, trace.output_tokens]
    if trace.blocks is not None:
        columns += [trace.blocks.ids, trace.blocks.offsets, np.array([trace.blocks.block_tokens])]
    for column in columns:
        digest.update(len(column).to_bytes(8, "little") + np.ascontiguousarray(column, dtype="<i8").tobytes())
    return digest.hexdigest()
