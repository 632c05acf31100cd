"""Shares the engine fairly between frontends (sessions), independent of how many requests each sends.

Method: start-time fair queueing (Goyal, Vin, Cheng 1996, "Start-time Fair Queueing"). The place of a request is its
start tag: the virtual time at its arrival, or the finish tag of its session's last request if that is later. Virtual
time is the highest tag admitted so far. A session with few requests is admitted at once; a session that floods the
engine waits behind its own requests. While two sessions always have requests waiting, the costs admitted for them
differ by at most the sum of their largest single costs.

With one session, tags never decrease from one request to the next, so that requests are served in order of arrival.
"""

from dataclasses import dataclass, field

from engine.core.request import RequestId


@dataclass(slots=True)
class _Flow:
    """One session.

    Attributes:
        finish_tag: start tag of its last request plus that request's cost.
        open: start tags of its unfinished requests, never decreasing in order of arrival.
    """

    finish_tag: int
    open: dict[RequestId, int] = field(default_factory=dict)


class FairQueue:
    """Assigns start tags; costs are in tokens.

    Invariant: every open request is in one flow; a flow without any is kept only while its finish tag is ahead of
    virtual time.
    """

    def __init__(self) -> None:
        self._flows: dict[int, _Flow] = {}
        self._num_open = 0
        self._virtual_time = 0

    def arrive(self, session: int, request_id: RequestId, cost: int) -> int:
        """Registers an accepted request and returns its start tag."""
        flow = self._flows.get(session)
        if flow is None:
            self._forget_idle()
            flow = self._flows[session] = _Flow(self._virtual_time)
        start_tag = max(self._virtual_time, flow.finish_tag)
        if flow.open:  # keep the session's order even if an earlier request cost less than estimated
            start_tag = max(start_tag, next(reversed(flow.open.values())))
        flow.finish_tag = start_tag + cost
        flow.open[request_id] = start_tag
        self._num_open += 1
        return start_tag

    def admit(self, start_tag: int) -> None:
        """Advances virtual time to the tag of an admitted request."""
        if start_tag > self._virtual_time:
            self._virtual_time = start_tag

    def finish(self, session: int, request_id: RequestId, cost_error: int) -> None:
        """Removes a finished request.

        Args:
            session: session of the request.
            request_id: the request.
            cost_error: actual minus estimated cost; charged to the next requests of the session.
        """
        flow = self._flows[session]
        flow.finish_tag += cost_error
        del flow.open[request_id]
        self._num_open -= 1
        if not self._num_open:  # without open requests no session is ahead
            self._flows.clear()

    def _forget_idle(self) -> None:
        now = self._virtual_time
        self._flows = {key: flow for key, flow in self._flows.items() if flow.open or flow.finish_tag > now}
