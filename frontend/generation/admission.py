"""Admission control: limits the requests and prompt tokens that wait for their first token, and estimates Retry-After.

Pure: the time is passed in. The engine's slots limit running requests; this limits the queue in front of them, before
any work is done for a request.
"""

from collections import deque
from collections.abc import Callable, Sequence

from frontend.errors import InvalidRequest, QueueFull, RequestTooLong

_RATE_WINDOW_S = 10.0
_MIN_RETRY_S = 0.5
_MAX_RETRY_S = 30.0  # clients ignore more than 60, which is twice this: see `RequestError.draw_retry_s`
_UNMEASURED_RETRY_S = 1.0


class Permit:
    """One place in the queue. `release` it at the first token, or when the request ends before."""

    def __init__(self, admission: "Admission", num_tokens: int) -> None:
        self._admission = admission
        self.num_tokens = num_tokens
        self.released = False

    def correct(self, num_tokens: int, now_s: float) -> None:
        """Replaces the estimate with the prompt's exact number of tokens.

        Raises:
            QueueFull: the exact number exceeds the limit; the permit still has to be released.
        """
        self._admission.correct(self, num_tokens, now_s)

    def release(self, now_s: float, *, served: bool = False) -> None:
        """Returns the place; only the first call counts.

        Args:
            now_s: monotonic seconds.
            served: whether the prompt was computed; counts for the rate of the queue.
        """
        if not self.released:
            self.released = True
            self._admission.return_permit(self, now_s, served=served)


class Admission:
    """Grants permits.

    Invariant: num_requests and num_tokens are the sums over the permits not released.

    Args:
        max_requests: maximum permits granted at once.
        max_tokens: maximum prompt tokens of all permits. Estimates may exceed it; exact numbers may not.

    Attributes:
        on_change: called after every change of the two sums.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self.on_change: Callable[[], None] = _do_nothing
        self._served: deque[tuple[float, int]] = deque()  # (when, tokens) of the last _RATE_WINDOW_S
        self._served_tokens = 0

    def check_capacity(self, now_s: float) -> None:
        """Checks that at least one more request may wait.

        Raises:
            QueueFull: see `admit`.
        """
        if self.num_requests >= self._max_requests:
            raise self._full(1, now_s)

    def admit(self, num_tokens: int, now_s: float) -> Permit:
        """Grants one permit.

        Args:
            num_tokens: tokens of the prompt, estimated.
            now_s: monotonic seconds.

        Raises:
            QueueFull: with the numbers and retry_after_s.
        """
        return self.admit_call([num_tokens], 1, now_s)[0][0]

    def admit_call(self, num_tokens: Sequence[int], num_answers: int, now_s: float) -> list[list[Permit]]:
        """Grants permits for one or more prompts with num_answers answers each, all or none. The first permit of a
        prompt counts its tokens.

        Args:
            num_tokens: tokens of each prompt, estimated.
            num_answers: at least 1.
            now_s: monotonic seconds.

        Raises:
            InvalidRequest: they exceed the size of the queue.
            QueueFull: as `admit`.
        """
        num_requests = len(num_tokens) * num_answers
        self._check_places(len(num_tokens), num_answers)
        excess = self.num_requests + num_requests - self._max_requests
        if excess > 0:
            raise self._full(num_requests, now_s)
        self._check_tokens(self.num_tokens, sum(num_tokens), now_s)
        self.num_requests += num_requests
        self.num_tokens += sum(num_tokens)
        self.on_change()
        return [[Permit(self, number), *(Permit(self, 0) for _ in range(1, num_answers))] for number in num_tokens]

    def check_fits(self, num_answers: int, num_tokens: int) -> None:
        """Refuses a request that would not fit an empty queue.

        Args:
            num_answers: answers to the prompt.
            num_tokens: exact tokens of the prompt.

        Raises:
            InvalidRequest: it can never fit.
        """
        self._check_places(1, num_answers)
        if num_tokens > self._max_tokens:
            raise RequestTooLong(
                f"the prompt has {num_tokens} tokens, and in all at most {self._max_tokens} may wait "
                "(--max-queued-tokens): it can never be served here",
                field="spec.prompt",
            )

    def _full(self, num_requests: int, now_s: float) -> QueueFull:
        excess = self.num_requests + num_requests - self._max_requests
        more = f"; {num_requests} more are too many" if num_requests > 1 else ""
        return QueueFull(
            f"{self.num_requests} requests wait for their first token, at most {self._max_requests} may{more}",
            retry_after_s=self._retry_after_s(excess, 0, now_s),
        )

    def _check_places(self, num_prompts: int, num_answers: int) -> None:
        if num_prompts * num_answers > self._max_requests:
            prompts = f"{num_prompts} prompts with {num_answers} answers each are {num_prompts * num_answers} requests"
            asked = prompts if num_prompts > 1 else f"{num_answers} answers are requested"
            raise InvalidRequest(
                f"{asked}, and at most {self._max_requests} requests may wait (--max-queued-requests): they can never "
                "be served here in one call",
                field="spec.prompt" if num_prompts > 1 else "spec.num_answers",
            )

    def correct(self, permit: Permit, num_tokens: int, now_s: float) -> None:
        """See Permit.correct."""
        others = self.num_tokens - permit.num_tokens
        if num_tokens > permit.num_tokens:
            self._check_tokens(others, num_tokens, now_s)
        self.num_tokens = others + num_tokens
        permit.num_tokens = num_tokens
        self.on_change()

    def return_permit(self, permit: Permit, now_s: float, *, served: bool) -> None:
        """See Permit.release."""
        self.num_requests -= 1
        self.num_tokens -= permit.num_tokens
        self.on_change()
        if served:
            self._served.append((now_s, permit.num_tokens))
            self._served_tokens += permit.num_tokens
            self._drop_old(now_s)

    def _check_tokens(self, waiting: int, num_tokens: int, now_s: float) -> None:
        if waiting and waiting + num_tokens > self._max_tokens:
            raise QueueFull(
                f"{waiting} prompt tokens wait to be computed, {num_tokens} more would exceed {self._max_tokens}",
                retry_after_s=self._retry_after_s(0, waiting + num_tokens - self._max_tokens, now_s),
            )

    def _retry_after_s(self, num_requests: int, num_tokens: int, now_s: float) -> float:
        """Estimates when that many requests and tokens will have left the queue, at the recent rate."""
        self._drop_old(now_s)
        if not self._served:
            return _UNMEASURED_RETRY_S
        elapsed_s = max(now_s - self._served[0][0], 1.0)
        requests_s = num_requests * elapsed_s / len(self._served)
        tokens_s = num_tokens * elapsed_s / max(self._served_tokens, 1)
        return min(max(round(max(requests_s, tokens_s), 1), _MIN_RETRY_S), _MAX_RETRY_S)

    def _drop_old(self, now_s: float) -> None:
        while self._served and self._served[0][0] < now_s - _RATE_WINDOW_S:
            self._served_tokens -= self._served.popleft()[1]


def _do_nothing() -> None:
    pass
