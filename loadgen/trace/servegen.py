"""ServeGen: a model of production traffic, from which a trace is drawn (arXiv:2505.09999, Apache-2.0).

What is sampled, and what is not. Each client's windows of some minutes come with a number of requests, a family of gaps
(gamma or Weibull) and its shape; the number is kept exactly, the gaps are drawn and stretched to fill the window, so
the rate is the recorded one and only the moments are chance. Prompt and answer lengths are drawn independently of each
other from the client's distributions in force when the window begins, so a client's mix of lengths is the recorded one
and any dependence between prompt and answer is lost. Sessions and shared prefixes are unknown. Every window has a
random stream of its own, so a cut of the day holds the same requests as that part of the whole day.

The accounting counts sampled requests, and `rows` numbers them: the files have no rows of requests.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import TraceError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.schema import Accounting, Trace
from loadgen.trace.servegen_model import ARRIVAL_NAMES, LENGTH_NAMES, ArrivalWindow, Distribution, TrafficModel, load

NAME = "servegen"
DESCRIPTION = (
    "servegen: CSV ..arrivals.. with client_id, window_start_s, rate_rps, iat_family, param1, param2 beside JSON lines "
    "..lengths.., or a folder with chunk-ID-trace.csv and chunk-ID-dataset.json"
)
_MAX_REQUESTS = 5_000_000  # 160 MB and some seconds; a week of the larger models is 60 million


def recognises(names: Iterable[str]) -> bool:
    """Whether these are the names in one of the two files."""
    return set(ARRIVAL_NAMES) <= set(names) or set(LENGTH_NAMES) <= set(names)


def read(path: Path, options: ReadOptions) -> Trace:
    """Draws a trace from the windows that begin before the end of `options.window_s` and end after its beginning.

    Raises: TraceError: see `servegen_model.load`; or no window is that early or late; or too many requests to draw.
    """
    model = load(path)
    from_s, to_s = options.window_s
    windows = [
        window for window in model.windows if window.start_s < to_s and window.start_s + window.length_s > from_s
    ]
    count = sum(window.num_requests for window in windows)
    if count == 0:
        raise TraceError(f"{path}: the model has no requests from {from_s:g} s to {to_s:g} s")
    if count > _MAX_REQUESTS:
        raise TraceError(f"{path}: {count} requests, more than {_MAX_REQUESTS} at once; choose a part with --window")
    samples = [_sample(model, window, options.seed) for window in windows]
    arrival_s = np.concatenate([sample.arrival_s for sample in samples])
    order = np.argsort(arrival_s, kind="stable")
    return Trace(
        name=path.name,
        format=NAME,
        digest="",
        arrival_s=arrival_s[order],
        input_tokens=np.concatenate([sample.input_tokens for sample in samples])[order],
        output_tokens=np.concatenate([sample.output_tokens for sample in samples])[order],
        rows=np.arange(count),
        accounting=Accounting(count),
    )


class _Sample(NamedTuple):
    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


def _sample(model: TrafficModel, window: ArrivalWindow, seed: int) -> _Sample:
    random = np.random.default_rng([seed, window.client, window.row])
    draw = random.standard_gamma if window.family == "Gamma" else random.weibull
    gaps = draw(window.shape, window.num_requests + 1)
    arrival_s = window.start_s + np.cumsum(gaps)[:-1] * (window.length_s / max(gaps.sum(), np.finfo(float).tiny))
    lengths = model.lengths_of(window)
    return _Sample(
        arrival_s,
        _drawn(lengths.input_tokens, random.random(window.num_requests)),
        _drawn(lengths.output_tokens, random.random(window.num_requests)),
    )


def _drawn(distribution: Distribution, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    return distribution.values[np.searchsorted(distribution.cumulative, uniform, side="right")]
