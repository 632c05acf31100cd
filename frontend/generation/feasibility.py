"""Refuses requests whose first token cannot be in time, before any work is done for them, and books their retry.

Pure: time and the engines' forecast are passed in. The engine checks again with what it knows better: exact counts,
the prefix cache and the requests of other frontends.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from chairlift.service.service_classes import ServiceClass
from frontend.errors import InvalidRequest, TargetsInfeasible
from frontend.generation.prompt_size import PromptSize
from frontend.generation.retry_calendar import SLOT_S, RetryCalendar
from frontend.generation.retry_ticket import Promise, RetryTickets, TicketError
from frontend.generation.token_estimate import TokenEstimate
from frontend.routing.forecast import FleetForecast
from frontend.types import LatencyTargets, RetryResult

MARGIN = 0.9
"""Part of a target that a prediction may fill: predictions have an error. A ticket is a promise and may fill it all."""

_SURPRISE = 1.1
"""A prompt with more than this times its estimated tokens is checked again."""


class RetryNotes(Protocol):
    """Counts what becomes of refusals and tickets, and how true predictions are."""

    def note_retry(self, result: RetryResult) -> None:
        """Counts a refusal or a ticket."""

    def note_prediction(self, error_s: float) -> None:
        """Observes the seconds between the predicted and the actual first token."""


@dataclass(slots=True, eq=False)
class ExpectedToken:
    """A request whose first token has a target.

    Attributes:
        due_s: when it is due, in seconds of time.monotonic(), as all times.
        num_tokens: of the prompt, estimated until it is tokenized.
        predicted_s: when it was predicted to come; None: nothing could be predicted.
        has_ticket: whether the request came back with a valid ticket.
    """

    targets: LatencyTargets
    model_name: str
    size: PromptSize
    due_s: float
    num_tokens: int
    predicted_s: float | None = None
    has_ticket: bool = False


class Feasibility:
    """Decides which requests are refused.

    Invariant: `num_pending` counts the requests between `expect` and `forget`: admitted, and in no engine yet.

    Args:
        forecast: returns what predicts a first token that is due at a time, of a model or an adapter by its name.
        tickets: signs the bookings.
        notes: counts refusals.
        calendar: holds the bookings.
        unix_offset_s: returns Unix time minus time.monotonic(): slots of tickets are in Unix time.
    """

    def __init__(
        self,
        forecast: Callable[[float, str], FleetForecast],
        tickets: RetryTickets,
        notes: RetryNotes,
        *,
        calendar: RetryCalendar,
        unix_offset_s: Callable[[], float],
    ) -> None:
        self._forecast = forecast
        self._tickets = tickets
        self._notes = notes
        self._calendar = calendar
        self._unix_offset_s = unix_offset_s
        self._estimate = TokenEstimate()
        self._pending: dict[ExpectedToken, None] = {}

    @property
    def num_pending(self) -> int:
        """Requests that were admitted and are in no engine yet."""
        return len(self._pending)

    def check_possible(self, targets: LatencyTargets) -> None:
        """Refuses targets of a request that no engine can meet, however little it has to do.

        Raises:
            InvalidRequest: names the target and the shortest step.
        """
        min_step_s = self._forecast(0.0, "").min_step_s
        for name, target_s in (("ttft", targets.ttft_s), ("inter_token", targets.inter_token_s)):
            if targets.is_own and target_s is not None and target_s < min_step_s:
                raise InvalidRequest(
                    f"{name} is {target_s:g} s, a step of the engine takes at least {min_step_s:.2g} s",
                    field=f"spec.latency_targets.{name}",
                )

    def impossible(self, classes: Iterable[ServiceClass]) -> list[str]:
        """Returns a text for each target of a class that no engine can meet; none before an engine has reported."""
        min_step_s = self._forecast(0.0, "").min_step_s
        return [
            f"{one.name} has {name} = {1e3 * target_s:.4g}"
            for one in classes
            for name, target_s in (("ttft_ms", one.ttft_s), ("inter_token_ms", one.inter_token_s))
            if target_s is not None and target_s < min_step_s
        ]

    def expect(
        self, targets: LatencyTargets, model_name: str, size: PromptSize, *, accepted_at_s: float, now_s: float
    ) -> ExpectedToken:
        """Admits a request whose targets have a first token; `forget` it when an engine has it, or it has ended.

        Raises:
            TargetsInfeasible: the first token cannot be in time; with a booked slot if there is one.
            InvalidRequest: its retry ticket is not accepted.
        """
        assert targets.ttft_s is not None
        num_tokens = size.num_tokens or self._estimate.num_tokens(model_name, size.num_chars)
        expected = ExpectedToken(targets, model_name, size, accepted_at_s + targets.ttft_s, num_tokens)
        if targets.retry_ticket:
            self._redeem(expected, now_s)
        self._check(expected, now_s)
        self._pending[expected] = None
        return expected

    def correct(self, expected: ExpectedToken, num_tokens: int, now_s: float) -> None:
        """Replaces the estimate of an admitted request with the exact number of tokens.

        Raises:
            TargetsInfeasible: it has far more tokens than estimated and cannot be in time with them.
        """
        estimated, expected.num_tokens = expected.num_tokens, num_tokens
        if expected.size.num_chars:
            self._estimate.learn_tokens(expected.model_name, expected.size.num_chars, num_tokens)
        if num_tokens > _SURPRISE * estimated:
            self._check(expected, now_s)

    def forget(self, expected: ExpectedToken) -> None:
        """Notes that an engine has a request, or that it has ended."""
        self._pending.pop(expected, None)

    def arrived(self, expected: ExpectedToken, num_cached: int, now_s: float) -> None:
        """Notes the first token of a request.

        Args:
            num_cached: prompt tokens found in the prefix cache.
        """
        self._estimate.learn_cached(expected.model_name, expected.num_tokens, num_cached)
        if expected.predicted_s is not None:
            self._notes.note_prediction(abs(now_s - expected.predicted_s))
        if expected.has_ticket:
            self._notes.note_retry(RetryResult.MET if now_s <= expected.due_s else RetryResult.MISSED)

    def refusal(self, expected: ExpectedToken, message: str, now_s: float) -> TargetsInfeasible:
        """Returns the error of a request that cannot be in time, with the slot and ticket of its retry.

        Args:
            message: why.
        """
        targets, name = expected.targets, expected.model_name
        assert targets.ttft_s is not None
        if expected.has_ticket:
            self._notes.note_retry(RetryResult.REFUSED)
        fleet = self._forecast(expected.due_s, name)
        rate, share = fleet.tokens_per_second, self._estimate.computed_share(name)
        if rate <= 0:
            return TargetsInfeasible(message)
        alone_s = fleet.alone_s(expected.num_tokens, share)
        if alone_s > self._limit_s(expected):
            return TargetsInfeasible(f"{message}; it takes {alone_s:.3g} s without any other request")
        late_s = fleet.first_token_s(expected.num_tokens, share) - targets.ttft_s
        booking = secrets.randbits(63)
        slot_s = self._calendar.book(
            booking,
            max(round(expected.num_tokens * share), 1),
            earliest_s=now_s + max(SLOT_S, late_s),
            now_s=now_s,
            tokens_per_second=rate,
        )
        if slot_s is None:
            self._notes.note_retry(RetryResult.BEYOND_HORIZON)
            return TargetsInfeasible(message)
        self._notes.note_retry(RetryResult.BOOKED)
        promise = Promise(
            targets.tenant, targets.service_class, slot_s + self._unix_offset_s(), expected.size.plain_tokens
        )
        return TargetsInfeasible(
            message, retry_after_s=slot_s - now_s, retry_ticket=self._tickets.issue(booking, promise)
        )

    def _redeem(self, expected: ExpectedToken, now_s: float) -> None:
        targets = expected.targets
        unix_s = now_s + self._unix_offset_s()
        asked = Promise(targets.tenant, targets.service_class, unix_s, expected.size.plain_tokens)
        try:
            booking = self._tickets.redeem(targets.retry_ticket, asked)
        except TicketError as error:
            self._notes.note_retry(RetryResult.INVALID)
            raise InvalidRequest(f"retry_ticket {error}", field="spec.latency_targets.retry_ticket") from None
        self._calendar.release(booking)
        expected.has_ticket = True

    def _check(self, expected: ExpectedToken, now_s: float) -> None:
        """Predicts the first token and refuses the request if it would be late."""
        targets = expected.targets
        fleet = self._forecast(expected.due_s, expected.model_name)
        rate = fleet.tokens_per_second
        if rate <= 0:
            return
        share = self._estimate.computed_share(expected.model_name)
        num_pending = sum(
            other.num_tokens for other in self._pending if other is not expected and other.due_s <= expected.due_s
        )
        wait_s = fleet.first_token_s(expected.num_tokens + num_pending / len(fleet.engines), share)
        expected.predicted_s = now_s + wait_s
        if not targets.may_be_refused:
            return
        if not expected.has_ticket:
            wait_s += self._calendar.booked_tokens(expected.due_s, now_s) / rate
        assert targets.ttft_s is not None
        spent_s = now_s - (expected.due_s - targets.ttft_s)
        if spent_s + wait_s > self._limit_s(expected):
            group = f" of service class {targets.service_class!r}" if targets.service_class else ""
            message = (
                f"the first token would come after about {spent_s + wait_s:.3g} s, the target{group} is "
                f"{targets.ttft_s:g} s"
            )
            raise self.refusal(expected, message, now_s)

    def _limit_s(self, expected: ExpectedToken) -> float:
        """Returns the longest predicted time to the first token with which a request is admitted."""
        ttft_s = expected.targets.ttft_s
        assert ttft_s is not None
        return ttft_s if expected.has_ticket else MARGIN * ttft_s * (1 - expected.targets.headroom)
