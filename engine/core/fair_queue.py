"""Places in the queue that share the engine out fairly between the frontends, whatever each of them sends.

Method: start-time fair queueing (Goyal, Vin, Cheng 1996, "Start-time Fair Queueing"). A request's place is its start
tag: the virtual time when it arrives, or the tag at which its session's last request will have had its cost, if that is
later. Virtual time is the highest tag that has been admitted. So a session that asks for little comes in at once, one
that floods the engine waits behind itself, and while several always have something waiting, the costs admitted for any
two of them differ by at most the two largest costs of a request of theirs.

With one session tags never fall from one request to the next: with ties by arrival the order is that of arrival.
"""

from dataclasses import dataclass, field

from engine.core.request import RequestId


@dataclass(slots=True)
class _Flow:
    """One session.

    Attributes:
        finish_tag: where its requests so far will have had their cost.
        open: its requests that have not ended, and their start tags, which never fall from one to the next.
    """

    finish_tag: int
    open: dict[RequestId, int] = field(default_factory=dict)


class FairQueue:
    """Hands out start tags; costs are tokens.

    Invariant: every open request is in one flow; a flow without any is kept only while it is ahead of virtual time.
    """

    def __init__(self) -> None:
        self._flows: dict[int, _Flow] = {}
        self._num_open = 0
        self._virtual_time = 0

    def arrive(self, session: int, request_id: RequestId, cost: int) -> int:
        """A request of that cost has been accepted.

        Returns: its start tag.
        """
        flow = self._flows.get(session)
        if flow is None:
            self._forget_idle()
            flow = self._flows[session] = _Flow(self._virtual_time)
        start_tag = max(self._virtual_time, flow.finish_tag)
        if flow.open:  # not before these, even if others turned out to cost less than was thought
            start_tag = max(start_tag, next(reversed(flow.open.values())))
        flow.finish_tag = start_tag + cost
        flow.open[request_id] = start_tag
        self._num_open += 1
        return start_tag

    def admit(self, start_tag: int) -> None:
        """A request with that tag begins to be served."""
        if start_tag > self._virtual_time:
            self._virtual_time = start_tag

    def finish(self, session: int, request_id: RequestId, cost_error: int) -> None:
        """A request has ended.

        Args:
            session: whose it was.
            request_id: which.
            cost_error: what it has cost more than was thought when it arrived; its session's next ones bear that.
        """
        flow = self._flows[session]
        flow.finish_tag += cost_error
        del flow.open[request_id]
        self._num_open -= 1
        if not self._num_open:  # nobody is there to be ahead of
            self._flows.clear()

    def _forget_idle(self) -> None:
        now = self._virtual_time
        self._flows = {key: flow for key, flow in self._flows.items() if flow.open or flow.finish_tag > now}
