"""Latencies of each request, in columns. Their definitions are here.

Pure: a RunData in, arrays out. In these definitions t_sched is when a request was due, t_send the moment before the
last call, t_i the arrival of message i, which carries k_i >= 1 tokens, and n the tokens of the answer.

Where the server states how many tokens its answer has, that count is n, and every k_i is scaled by n over the counted
tokens: a server may put several tokens into one message, or a gateway one token into several, without saying so, and
each such message was counted as one token. TPOT needs n alone; of ITL only the mean is then exact.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadgen.record import ABSENT, RunData, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

_NS_PER_MS = 1e6
_NS_PER_S = 1e9


class Gaps(NamedTuple):
    """Time between one message and the next of the same request; by request, then time.

    Requests of which a message's time was lost have none: a gap across the hole would not be one.

    Attributes:
        request: [gaps] int64, index of the request.
        ms: [gaps] float64.
        tokens: [gaps] float64, tokens in the message that ends the gap.
    """

    request: "Integers"
    ms: "Floats"
    tokens: "Floats"

    @property
    def per_token_ms(self) -> "Floats":
        """[gaps] float64: ITL, which counts `tokens` times."""
        return self.ms / self.tokens


class Arrivals(NamedTuple):
    """Messages with tokens, in no particular order.

    Attributes:
        request: [messages] int64, index of the request.
        at_s: [messages] float64, seconds from the start of the run.
        tokens: [messages] float64.
    """

    request: "Integers"
    at_s: "Floats"
    tokens: "Floats"


@dataclass(frozen=True, slots=True)
class Samples:
    """One value per request, [requests] each; NaN where there is none. Milliseconds unless the name says otherwise.

    Attributes:
        scheduled_s, first_s, last_s, ended_s: seconds from the start of the run.
        sent_s, last_sent_s: the same, of the first and the last call; they differ if a refused request came back.
        retry_due_s: when it was told to come back.
        completed: bool: status OK. Latencies are summed up over these.
        num_chunks: int64, messages with tokens.
        num_tokens: int64, n.
        ttft: t_1 - t_sched.
        service_ttft: t_1 - t_send.
        tpot: (t_last - t_1) / (n - 1); needs n >= 2, in two messages: of one that came whole no time is known.
        ttst: t_2 - t_1, from message to message.
        max_stall: the longest gap between messages.
        max_itl: the longest gap per token.
        e2e: t_last - t_sched.
        service_e2e: t_last - t_send.
        e2e_status: from t_sched until the status was known.
        normalized: e2e / n.
        client_wait: t_send - t_sched, with the time until a refused request came back.
        dispatch_lag: how late the client made its calls, the latest of them: the first one after t_sched, another one
            after the time it was told to come back.
        server_queued, server_prefill: the server's own account.
        elsewhere: service_ttft less these two: with client_wait the four are ttft.
        gaps, arrivals: pooled over all requests.
    """

    scheduled_s: "Floats"
    sent_s: "Floats"
    last_sent_s: "Floats"
    retry_due_s: "Floats"
    first_s: "Floats"
    last_s: "Floats"
    ended_s: "Floats"
    completed: "Flags"
    num_chunks: "Integers"
    num_tokens: "Integers"
    ttft: "Floats"
    service_ttft: "Floats"
    tpot: "Floats"
    ttst: "Floats"
    max_stall: "Floats"
    max_itl: "Floats"
    e2e: "Floats"
    service_e2e: "Floats"
    e2e_status: "Floats"
    normalized: "Floats"
    client_wait: "Floats"
    dispatch_lag: "Floats"
    server_queued: "Floats"
    server_prefill: "Floats"
    elsewhere: "Floats"
    gaps: Gaps
    arrivals: Arrivals


def samples_of(run: RunData) -> Samples:
    """Returns the columns of a run."""
    requests = run.requests
    num_chunks = requests["num_chunks"].astype(np.int64)
    scheduled = _time(requests["scheduled_ns"])
    if not run.settings.get("closed_loop"):  # the schedule is fixed beforehand, sent or not
        planned = np.round(run.workload.arrival_s * _NS_PER_S)
        scheduled = np.where(np.isnan(scheduled), planned, scheduled)
    first_sent, first, last = (_time(requests[name]) for name in ("sent_ns", "first_ns", "last_ns"))
    resent, retry_due, ended = (_time(requests[name]) for name in ("resent_ns", "retry_due_ns", "ended_ns"))
    retry_lag = _time(requests["retry_lag_ns"])
    sent = np.where(np.isnan(resent), first_sent, resent)
    queued, prefill = (_time(requests[name]) / 1e3 for name in ("server_queued_us", "server_prefill_us"))
    counted = requests["num_tokens"].astype(np.int64)
    stated = requests["server_output_tokens"]
    num_tokens = np.where(stated > 0, stated, counted).astype(np.int64)
    scale = num_tokens / np.maximum(counted, 1)
    arrivals = Arrivals(
        run.chunks["request"].astype(np.int64),
        run.chunks["arrived_ns"] / _NS_PER_S,
        run.chunks["tokens"] * scale[run.chunks["request"]],
    )
    gaps, second = _gaps(run, scale)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Samples(
            scheduled_s=scheduled / _NS_PER_S,
            sent_s=first_sent / _NS_PER_S,
            last_sent_s=sent / _NS_PER_S,
            retry_due_s=retry_due / _NS_PER_S,
            first_s=first / _NS_PER_S,
            last_s=last / _NS_PER_S,
            ended_s=ended / _NS_PER_S,
            completed=requests["status"] == Status.OK,
            num_chunks=num_chunks,
            num_tokens=num_tokens,
            ttft=(first - scheduled) / _NS_PER_MS,
            service_ttft=(first - sent) / _NS_PER_MS,
            tpot=np.where(
                (num_tokens >= 2) & (num_chunks >= 2), (last - first) / (num_tokens - 1) / _NS_PER_MS, np.nan
            ),
            ttst=second,
            max_stall=_largest(gaps.request, gaps.ms, len(requests)),
            max_itl=_largest(gaps.request, gaps.per_token_ms, len(requests)),
            e2e=(last - scheduled) / _NS_PER_MS,
            service_e2e=(last - sent) / _NS_PER_MS,
            e2e_status=(ended - scheduled) / _NS_PER_MS,
            normalized=(last - scheduled) / num_tokens / _NS_PER_MS,
            client_wait=(sent - scheduled) / _NS_PER_MS,
            dispatch_lag=np.fmax(first_sent - scheduled, retry_lag) / _NS_PER_MS,
            server_queued=queued,
            server_prefill=prefill,
            elsewhere=(first - sent) / _NS_PER_MS - queued - prefill,
            gaps=gaps,
            arrivals=arrivals,
        )


def _time(values: "NDArray[Any]") -> "Floats":
    return np.where(values == ABSENT, np.nan, values.astype(np.float64))


def _gaps(run: RunData, scale: "Floats") -> tuple[Gaps, "Floats"]:
    """Returns all gaps, and each request's first one."""
    whole = np.bincount(run.chunks["request"], minlength=len(run.requests)) == run.requests["num_chunks"]
    chunks = run.chunks[whole[run.chunks["request"]]]
    chunks = chunks[np.argsort(chunks["request"], kind="stable")]  # a request's messages are in order of arrival
    request = chunks["request"].astype(np.int64)
    follows = np.flatnonzero(request[1:] == request[:-1]) + 1
    later = request[follows]
    gaps = Gaps(
        later,
        (chunks["arrived_ns"][follows] - chunks["arrived_ns"][follows - 1]) / _NS_PER_MS,
        chunks["tokens"][follows] * scale[later],
    )
    second = np.full(len(run.requests), np.nan)
    with_two, position = np.unique(later, return_index=True)
    second[with_two] = gaps.ms[position]
    return gaps, second


def _largest(group: "Integers", values: "Floats", count: int) -> "Floats":
    """[count] float64: the largest value of each group; NaN of an empty one. Groups are ascending."""
    largest = np.full(count, np.nan)
    if len(group):
        present, starts = np.unique(group, return_index=True)
        largest[present] = np.maximum.reduceat(values, starts)
    return largest
