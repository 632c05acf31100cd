"""C17: delivered tokens per second and core of the frontend.

Claim: the frontend never limits a server.

Goal: 150,000 delivered tokens per second of its CPU time with 8 tokens per message, 20,000 with one token per message.

Method: a frontend, a client, and an engine without a model: the real scheduler, step loop and server at a steady pace,
slow enough that nothing accumulates. 64 streams at once request text and ids. The figure is delivered tokens over the
CPU seconds of the frontend process, so other processes and idle cores do not count. The costs of engine and client are
measured in the same way.

The limit, measured in the same run: CPU seconds of a bare grpc.aio server per message of 8 bytes, on as many streams,
without a pause.
"""

import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack

from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload, shared_prefix_workload
from loadgen.experiments.client import Client, delivered
from loadgen.experiments.pair import Pair
from loadgen.experiments.wire.bare_hop import BareHop
from loadgen.processes import cpu_s

_NUM_STREAMS = 64
_PROMPT_LEN = 8
_PERIOD_US = {1: 6400, 8: 1600}  # by tokens per message: 10,000 and 40,000 tokens/s
_OUTPUT_LEN = {1: 400, 8: 1600}
_GOALS = {1: 20_000, 8: 150_000}
_NUM_BARE_MESSAGES = 400
_BARE = "seconds per message, bare grpc.aio"


class _Tally:
    """Delivers one workload through a pair and keeps the cost per token of each process."""

    def __init__(self, pair: Pair, client: Client, workload: Workload) -> None:
        self.cpu_us_per_token: dict[str, list[float]] = {"engine": [], "frontend": [], "client": []}
        self.tokens_per_message: list[float] = []
        self._pair = pair
        self._client = client
        self._workload = workload

    def deliver(self) -> float:
        """One run; returns the frontend's CPU seconds per token."""
        clocks = {
            "engine": self._pair.engine.cpu_s,
            "frontend": self._pair.frontend.cpu_s,
            "client": lambda: cpu_s(os.getpid()),
        }
        workload = self._workload
        _, cost = delivered("a run", lambda: self._client.streams(workload), workload.num_output_tokens, clocks)
        for name, cpu_us in cost.cpu_us.items():
            self.cpu_us_per_token[name].append(cpu_us)
        self.tokens_per_message.append(cost.tokens_per_message)
        return cost.cpu_us["frontend"] / 1e6


def run(settings: Settings) -> Outcome:
    """Runs the experiment."""
    num_streams = 4 if settings.quick else _NUM_STREAMS
    tallies: dict[int, _Tally] = {}
    with ExitStack() as stack:
        for hold, period_us in _PERIOD_US.items():
            settings.progress(f"starting a pair for {hold} tokens per message")
            flags = ("--hold", str(hold), "--period-us", str(period_us))
            folder = settings.scratch / f"hold-{hold}"
            pair = stack.enter_context(Pair(flags, folder, engine_module="engine.bench.null_engine"))
            pair.wait_until_served()
            client = stack.enter_context(Client(pair.address))
            workload = shared_prefix_workload(
                num_streams,
                shared_len=0,
                own_len=_PROMPT_LEN,
                output_len=16 if settings.quick else _OUTPUT_LEN[hold],
                vocab_size=pair.model.vocab_size - 1,
            )
            tallies[hold] = _Tally(pair, client, workload)
        hop = stack.enter_context(BareHop(settings.scratch, period_s=0.0))
        num_bare = 16 if settings.quick else _NUM_BARE_MESSAGES
        systems: dict[str, Callable[[], float]] = {
            **{_name(hold): tally.deliver for hold, tally in tallies.items()},
            _BARE: lambda: hop.cpu_s_per_message(num_streams, num_bare),
        }
        samples = alternate(systems, rounds=settings.rounds, progress=settings.progress)
    return Outcome(
        tuple(_result(hold, tally, samples) for hold, tally in tallies.items()),
        raw={
            f"{hold} per message": {
                "cpu_us_per_token": tally.cpu_us_per_token,
                "tokens_per_message": tally.tokens_per_message,
            }
            for hold, tally in tallies.items()
        }
        | {_BARE: samples.raw[_BARE]},
    )


def _result(hold: int, tally: _Tally, samples: Samples) -> Result:
    costs = ", ".join(f"{process} {min(values):.1f}" for process, values in tally.cpu_us_per_token.items())
    per_message = statistics.fmean(tally.tokens_per_message)
    return Result(
        "C17",
        f"delivered tokens/s per frontend core, {per_message:.1f} per message",
        1 / samples.best(_name(hold)),
        goal=_GOALS[hold],
        floor=hold / samples.best(_BARE),
        note=f"CPU us per token: {costs}",
    )


def _name(hold: int) -> str:
    return f"seconds per token at {hold} per message"
