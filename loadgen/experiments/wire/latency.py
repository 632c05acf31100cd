"""C18: latency that gRPC and detokenization add to a token between the engine's model and the client.

Claim: two gRPC hops and a detokenizer between model and client are not noticeable.

Goal: on an idle system 0.3 ms per token at the median, 1.0 ms at the 99th percentile.

Method: a frontend, a client, and an engine without a model that yields one token every 10 ms on one stream. The engine
records when its runner returns, the client when it has text and id; both read the machine's monotonic clock. In
between: the scheduler's update, the step loop's hand-over, the engine's stream, the frontend's detokenizer and stream,
the client's event loop.

The limit, measured in the same run: twice the time of a message of 8 bytes on a bare grpc.aio stream between two
processes that do nothing else.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import shared_prefix_workload
from loadgen.experiments.client import Client, Stream
from loadgen.experiments.pair import Pair
from loadgen.experiments.wire.bare_hop import BareHop

_PERIOD_S = 0.010
_NUM_TOKENS = 400
_GOALS_MS = {50: 0.3, 99: 1.0}
_PAIR, _HOP = "p50 in ms, pair", "p50 in ms, bare hop"


def run(settings: Settings) -> Outcome:
    """Runs the experiment."""
    num_tokens, period_s = (16, 0.001) if settings.quick else (_NUM_TOKENS, _PERIOD_S)
    times = settings.scratch / "times"
    flags = ("--period-us", str(round(1e6 * period_s)), "--times", times)
    latencies_ms: dict[str, list[list[float]]] = {_PAIR: [], _HOP: []}
    with (
        Pair(flags, settings.scratch / "pair", engine_module="engine.bench.null_engine") as pair,
        BareHop(settings.scratch, period_s=period_s) as hop,
        Client(pair.address) as client,
    ):
        pair.wait_until_served()
        vocab_size = pair.model.vocab_size - 1
        workload = shared_prefix_workload(1, shared_len=0, own_len=8, output_len=num_tokens, vocab_size=vocab_size)

        def timed(name: str, measure: Callable[[], list[float]]) -> Callable[[], float]:
            def run() -> float:
                latencies_ms[name].append(measure())
                return float(np.median(latencies_ms[name][-1]))

            return run

        systems = {
            _PAIR: timed(_PAIR, lambda: pair_latencies_ms(client.streams(workload)[0], times)),
            _HOP: timed(_HOP, lambda: hop.latencies_ms(num_tokens)),
        }
        alternate(systems, rounds=settings.rounds, progress=settings.progress)
    counted = {name: rounds[-settings.rounds :] for name, rounds in latencies_ms.items()}
    results = []
    for percentile, goal_ms in _GOALS_MS.items():
        pair_ms, hop_ms = ([float(np.percentile(values, percentile)) for values in counted[n]] for n in (_PAIR, _HOP))
        results.append(
            Result(
                "C18",
                f"added latency of a token, p{percentile}",
                min(pair_ms),
                "ms",
                goal_ms,
                "at most",
                floor=2 * min(hop_ms),
                note=f"rounds {min(pair_ms):.2f}..{max(pair_ms):.2f}; limit: two bare grpc.aio hops",
            )
        )
    return Outcome(tuple(results), raw={"latencies_ms": counted})


def pair_latencies_ms(stream: Stream, times: Path) -> list[float]:
    """Milliseconds from model to client of each token of an answer.

    Args:
        stream: the engine's newest answer.
        times: the engine's record, see `NullRunner`.
    Raises: BenchmarkError: the engine has recorded fewer tokens.
    """
    arrived_s = np.repeat(stream.times_s, stream.counts)
    sampled_ns = np.fromfile(times, dtype=np.int64)[-len(arrived_s) :]
    if len(sampled_ns) != len(arrived_s):
        raise BenchmarkError(f"{len(sampled_ns)} tokens were sampled, {len(arrived_s)} have arrived")
    latencies: list[float] = (1e3 * (arrived_s - 1e-9 * sampled_ns)).tolist()
    return latencies
