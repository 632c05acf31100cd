"""Runs a trace of the experiment with the load generator, as any other run."""

from loadgen.record import LiveView, RunData
from loadgen.run.controller import RunOptions, run_workload
from loadgen.target.base import TargetSpec
from loadgen.trace.schema import Trace

_DRAIN_TIMEOUT_S = 1800.0


def run_trace(trace: Trace, address: str, salt: str) -> RunData:
    """Runs a trace against a frontend, from one process, so that requests leave in their order.

    Args:
        trace: arrivals from 0.
        address: HOST:PORT.
        salt: of the prompts.
    Raises: TargetError: nobody answers there.
    """
    options = RunOptions(workers=1, salt=salt, drain_timeout_s=_DRAIN_TIMEOUT_S)
    return run_workload(trace, TargetSpec(url=f"grpc://{address}"), options, _ignore)


def _ignore(view: LiveView) -> None:
    """Shows no progress."""
