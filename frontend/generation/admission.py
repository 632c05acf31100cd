"""Who may wait: a bound on requests and on prompt tokens that have no first token yet, and a guess when to come back.

Pure: numbers in, permits out, the time is passed in. What is running already is bounded by the engine's seats; this
bounds the queue in front of them, before any work is done for a request.
"""

from collections import deque
from collections.abc import Callable, Sequence

from frontend.errors import InvalidRequest, QueueFull, RequestTooLong

_RATE_WINDOW_S = 10.0
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_UNMEASURED_RETRY_S = 1.0


class Permit:
    """One place in the queue. Give it back with `release`, when the first token is there or the request has ended
    before.
    """

    def __init__(self, admission: "Admission", num_tokens: int) -> None:
        self._admission = admission
        self.num_tokens = num_tokens
        self.released = False

    def correct(self, num_tokens: int, now_s: float) -> None:
        """Replaces the guess with the prompt's true number of tokens.

        Raises:
            QueueFull: with the true number the queue is over its bound; the permit still has to be released.
        """
        self._admission.correct(self, num_tokens, now_s)

    def release(self, now_s: float, *, served: bool = False) -> None:
        """Gives the place back; only the first call counts.

        Args:
            now_s: monotonic seconds.
            served: whether the prompt was computed, which tells how fast the queue moves.
        """
        if not self.released:
            self.released = True
            self._admission.give_back(self, now_s, served=served)


class Admission:
    """Hands out permits.

    Invariant: num_requests and num_tokens are the sums over the permits not released.

    Args:
        max_requests: most permits out at once.
        max_tokens: most prompt tokens of all permits. A guess alone may be more: only the true number is refused.

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
        """Refuses whatever a request may ask for, as long as there is no place at all.

        Raises:
            QueueFull: as `admit`.
        """
        if self.num_requests >= self._max_requests:
            raise self._full(1, now_s)

    def admit(self, num_tokens: int, now_s: float) -> Permit:
        """Takes a place.

        Args:
            num_tokens: tokens of the prompt, as far as known.
            now_s: monotonic seconds.

        Raises:
            QueueFull: says the numbers and when to come back.
        """
        return self.admit_group(1, num_tokens, now_s)[0]

    def admit_group(self, num_requests: int, num_tokens: int, now_s: float) -> list[Permit]:
        """Takes places for requests with one prompt in common, all or none. The first permit counts its tokens.

        Args:
            num_requests: at least 1.
            num_tokens: tokens of the prompt, as far as known.
            now_s: monotonic seconds.

        Raises:
            QueueFull: as `admit`.
        """
        return self.admit_call([num_tokens], num_requests, now_s)[0]

    def admit_call(self, num_tokens: Sequence[int], num_answers: int, now_s: float) -> list[list[Permit]]:
        """Takes places for several prompts, with as many answers to each, all or none. The first permit of a prompt
        counts its tokens.

        Args:
            num_tokens: tokens of each prompt, as far as known.
            num_answers: at least 1.
            now_s: monotonic seconds.

        Raises:
            InvalidRequest: they are more than the queue has places.
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
        """Refuses what no waiting would help.

        Args:
            num_answers: to one prompt.
            num_tokens: of this prompt, exactly.

        Raises:
            InvalidRequest: the queue would be too small even if it were empty.
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
            asked = prompts if num_prompts > 1 else f"{num_answers} answers are asked for"
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

    def give_back(self, permit: Permit, now_s: float, *, served: bool) -> None:
        """See Permit.release."""
        self.num_requests -= 1
        self.num_tokens -= permit.num_tokens
        self.on_change()
        if served:
            self._served.append((now_s, permit.num_tokens))
            self._served_tokens += permit.num_tokens
            self._forget(now_s)

    def _check_tokens(self, waiting: int, num_tokens: int, now_s: float) -> None:
        if waiting and waiting + num_tokens > self._max_tokens:
            raise QueueFull(
                f"{waiting} prompt tokens wait to be computed, {num_tokens} more would exceed {self._max_tokens}",
                retry_after_s=self._retry_after_s(0, waiting + num_tokens - self._max_tokens, now_s),
            )

    def _retry_after_s(self, num_requests: int, num_tokens: int, now_s: float) -> float:
        """When that many requests and tokens will have left the queue, at the rate of the last seconds."""
        self._forget(now_s)
        if not self._served:
            return _UNMEASURED_RETRY_S
        elapsed_s = max(now_s - self._served[0][0], 1.0)
        requests_s = num_requests * elapsed_s / len(self._served)
        tokens_s = num_tokens * elapsed_s / max(self._served_tokens, 1)
        return min(max(round(max(requests_s, tokens_s), 1), _MIN_RETRY_S), _MAX_RETRY_S)

    def _forget(self, now_s: float) -> None:
        while self._served and self._served[0][0] < now_s - _RATE_WINDOW_S:
            self._served_tokens -= self._served.popleft()[1]


def _do_nothing() -> None:
    pass
