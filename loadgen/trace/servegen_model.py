"""ServeGen's model of production traffic, as read: per client, arrival windows and distributions of lengths.

Two layouts are read. The packed one is a CSV (`..arrivals..`) with client_id, window_start_s, rate_rps, iat_cv,
iat_family, param1, param2 and beside it, of the same name with `lengths` for `arrivals`, JSON lines with client_id,
window_start_s, input_tokens, output_tokens as probabilities by value. The other is a folder as the project publishes
it, two files a client: chunk-ID-trace.csv without a header, and chunk-ID-dataset.json with the distributions as texts.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from loadgen.errors import TraceError
from loadgen.trace.formats import MAX_TOKENS, MalformedRowError, Record, real_number, whole_number
from loadgen.trace.records import open_records

if TYPE_CHECKING:
    from numpy.typing import NDArray

Family = Literal["Gamma", "Weibull"]
ARRIVAL_NAMES = ("client_id", "window_start_s", "rate_rps", "iat_cv", "iat_family", "param1", "param2")
LENGTH_NAMES = ("client_id", "window_start_s", "input_tokens", "output_tokens")
_DEFAULT_WINDOW_S = 600.0


class ArrivalWindow(NamedTuple):
    """A time window with one distribution of a client's requests.

    Attributes:
        client: its number.
        row: of the arrivals, from 0.
        start_s, length_s: when.
        num_requests: in it.
        family, shape: distribution of the gaps between them; its scale follows from the count.
    """

    client: int
    row: int
    start_s: float
    length_s: float
    num_requests: int
    family: Family
    shape: float


class Distribution(NamedTuple):
    """Lengths and the probability of each or any smaller one: [values] int64, [values] float64 ascending to 1."""

    values: "NDArray[np.int64]"
    cumulative: "NDArray[np.float64]"


class LengthWindow(NamedTuple):
    """From when on a client's requests have these lengths."""

    start_s: float
    input_tokens: Distribution
    output_tokens: Distribution


class TrafficModel(NamedTuple):
    """All clients: windows with requests in the order of their file; lengths by client, ascending in time."""

    windows: list[ArrivalWindow]
    lengths: dict[int, list[LengthWindow]]

    def lengths_of(self, window: ArrivalWindow) -> LengthWindow:
        """Returns the lengths that apply when the window begins: the last known, or the first if there are none yet.

        Raises: TraceError: none are known of this client.
        """
        known = self.lengths.get(window.client, [])
        if not known:
            raise TraceError(f"client {window.client} has requests from {window.start_s:g} s on, but no lengths")
        return next((lengths for lengths in reversed(known) if lengths.start_s <= window.start_s), known[0])


def load(path: Path) -> TrafficModel:
    """Reads the arrivals file with the lengths beside it (or the other way round), or a published folder.

    Raises: TraceError: a file is missing, of another form, or has a row that cannot be (names file and line).
    """
    if path.is_dir():
        return _load_folder(path)
    return TrafficModel(
        _windows(_rows(_partner(path, "lengths", "arrivals", "jsonl", "csv"), ARRIVAL_NAMES)),
        _lengths(_rows(_partner(path, "arrivals", "lengths", "csv", "jsonl"), LENGTH_NAMES)),
    )


def _partner(path: Path, of: str, wanted: str, of_kind: str, wanted_kind: str) -> Path:
    if wanted in path.name:
        return path
    if of not in path.name:
        raise TraceError(f"{path}: a servegen model is a file named ..arrivals.. with one named ..lengths.. beside it")
    name = path.name.replace(of, wanted).replace(f".{of_kind}", f".{wanted_kind}").removesuffix(".gz")
    candidates = [path.with_name(name), path.with_name(name + ".gz")]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise TraceError(f"{path}: its {wanted} are missing; neither {name} nor {name}.gz is beside it")
    return found


def _rows(path: Path, expected: tuple[str, ...]) -> Iterator[tuple[str, Record]]:
    """Places, for complaints, and records."""
    with open_records(path) as records:
        missing = set(expected) - set(records.names)
        if missing:
            raise TraceError(f"not of format servegen: no {', '.join(sorted(missing))}")
        for line, record in records:
            if isinstance(record, MalformedRowError):
                raise TraceError(f"line {line}: {record.detail}")
            yield f"{path}: line {line}", record


def _windows(rows: Iterator[tuple[str, Record]]) -> list[ArrivalWindow]:
    parsed = [(row, place, *_client_and_start(place, record), record) for row, (place, record) in enumerate(rows)]
    starts: dict[int, list[float]] = {}
    for _, _, client, start_s, _ in parsed:
        starts.setdefault(client, []).append(start_s)
    ends = {client: _ends(sorted(of_client)) for client, of_client in starts.items()}
    windows = []
    for row, place, client, start_s, record in parsed:
        length_s = ends[client][start_s] - start_s
        try:
            count = round(real_number(record, "rate_rps") * length_s)
            shape = real_number(record, "param1")
            family = record["iat_family"]
            if count < 0 or (count > 0 and (family not in ("Gamma", "Weibull") or shape <= 0)):
                raise MalformedRowError(
                    "iat_family", f"{count} requests with gaps of family {family!r}, shape {shape:g}"
                )
        except MalformedRowError as error:
            raise TraceError(f"{place}: {error.detail}") from None
        if count:
            windows.append(ArrivalWindow(client, row, start_s, length_s, count, family, shape))
    return windows


def _ends(starts: list[float]) -> dict[float, float]:
    """Each window ends where the next begins; the last is as long as the one before it."""
    last = starts[-1] - starts[-2] if len(starts) > 1 else _DEFAULT_WINDOW_S
    return dict(zip(starts, [*starts[1:], starts[-1] + last], strict=True))


def _client_and_start(place: str, record: Record) -> tuple[int, float]:
    try:
        return whole_number(record, "client_id", low=0), real_number(record, "window_start_s")
    except MalformedRowError as error:
        raise TraceError(f"{place}: {error.detail}") from None


def _lengths(rows: Iterator[tuple[str, Record]]) -> dict[int, list[LengthWindow]]:
    lengths: dict[int, list[LengthWindow]] = {}
    for place, record in rows:
        client, start_s = _client_and_start(place, record)
        if missing := [name for name in LENGTH_NAMES[2:] if name not in record]:
            raise TraceError(f"{place}: no {', '.join(missing)}")
        if record["input_tokens"] and record["output_tokens"]:
            window = LengthWindow(start_s, *(_distribution(place, name, record[name]) for name in LENGTH_NAMES[2:]))
            lengths.setdefault(client, []).append(window)
    for of_client in lengths.values():
        of_client.sort(key=lambda window: window.start_s)
    return lengths


def _distribution(place: str, name: str, probabilities: Mapping[Any, Any]) -> Distribution:
    try:
        ordered = sorted((int(value), float(share)) for value, share in probabilities.items())
    except (AttributeError, TypeError, ValueError):
        raise TraceError(f"{place}: {name} are not probabilities by number of tokens") from None
    values = np.array([value for value, _ in ordered], dtype=np.int64)
    shares = np.array([share for _, share in ordered], dtype=np.float64)
    if not (values[0] >= 0 and values[-1] <= MAX_TOKENS and (shares >= 0).all() and abs(shares.sum() - 1) < 1e-3):
        raise TraceError(
            f"{place}: {name} have probabilities from {values[0]} tokens on that add up to {shares.sum():g}"
        )
    cumulative = np.cumsum(shares)
    return Distribution(np.maximum(values, 1), cumulative / cumulative[-1])


def _load_folder(folder: Path) -> TrafficModel:
    arrivals: list[tuple[str, Record]] = []
    lengths: list[tuple[str, Record]] = []
    for path in sorted(folder.glob("chunk-*-trace.csv")):
        client = path.name.removeprefix("chunk-").removesuffix("-trace.csv")
        try:
            for line, text in enumerate(path.read_text().splitlines(), 1):
                values = dict(zip(ARRIVAL_NAMES[1:], text.split(","), strict=True))
                arrivals.append((f"{path}: line {line}", {"client_id": client, **values}))
            dataset = folder / f"chunk-{client}-dataset.json"
            for start_s, fields in json.loads(dataset.read_text()).items():
                named = {name: ast.literal_eval(fields[name]) for name in LENGTH_NAMES[2:]}
                lengths.append((f"{dataset}: {start_s}", {"client_id": client, "window_start_s": start_s, **named}))
        except OSError as error:
            raise TraceError(f"{error.filename}: {error.strerror}") from error
        except (ValueError, KeyError, AttributeError, TypeError, SyntaxError) as error:
            raise TraceError(f"{path} or the data set beside it is not of format servegen: {error}") from error
    if not arrivals:
        raise TraceError(f"{folder}: a folder without chunk-ID-trace.csv files is no servegen model")
    return TrafficModel(_windows(iter(arrivals)), _lengths(iter(lengths)))
