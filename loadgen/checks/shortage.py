"""What a client that came late was short of, and so what helps: not more workers, where other work has the cores. And
what held requests up on their way: a busy machine before anything else.

Pure.
"""

from collections.abc import Mapping

from loadgen.checks.limits import Limits
from loadgen.record import RunData

_BUSY_SECOND, _BUSY_ON_AVERAGE = 0.9, 0.7


def what_helps(run: RunData, limits: Limits) -> str:
    """Returns advice, from the CPU use of the workers and of the whole machine."""
    shares = [float(worker.cpu_share.max()) for worker in run.workers if len(worker.cpu_share)]
    if not shares:
        return "more --workers, free cores, or a lower rate"
    used = f"{max(shares):.0%} of a core"
    if max(shares) > limits.cpu_share.degraded:
        return f"a worker used {used}: more --workers on free cores, or a lower rate"
    host = run.settings.get("host_busy")
    if host is None:
        return f"the workers used {used} at most, so more of them would not help: look for other work on this machine"
    busy = _busy(host)
    if _is_short(host):
        return (
            f"the workers used {used} at most while this machine was {busy}: other work on it, perhaps the server "
            "itself, held them up; quieten it, or run from another machine"
        )
    return (
        f"neither the workers ({used} at most) nor this machine ({busy}) were short of CPU: where many requests are "
        "due at one moment --workers share them, else look for a CPU limit of the container or a paused machine"
    )


def what_held_back(run: RunData) -> str:
    """Returns why requests are delayed between client and server, the most likely cause first."""
    cap = "a cap on streams or connections, or a proxy, holds them back outside the server"
    host = run.settings.get("host_busy")
    if host is None or not _is_short(host):
        return cap
    return (
        f"this machine was {_busy(host)}, so that they waited for a core; quieten it, or run from another "
        f"machine. If it stays, {cap}"
    )


def _is_short(host: Mapping[str, float]) -> bool:
    """Returns whether a process may have had to wait for a core of this machine."""
    return host["peak"] >= _BUSY_SECOND or host["mean"] >= _BUSY_ON_AVERAGE


def _busy(host: Mapping[str, float]) -> str:
    return f"{host['peak']:.0%} busy in the worst second, {host['mean']:.0%} on average"
