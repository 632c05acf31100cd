"""When the tokens of a request are due, and whether it still meets its latency targets."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from engine.core.latency.targets import LatencyTargets, Pacing, WhenInfeasible
from engine.core.outputs import ScheduledRow
from engine.core.request import Request

_SAFETY = (0.85, 0.93)
"""By `Pace.is_paced`: most of the slack that a step may use, 1 - 3 times the p90 error of the step-time model; more
where slack helps."""

MARGIN_DEVIATIONS = (3.0, 2.3)
"""By `Pace.is_paced`: standard deviations of the model's error that must fit between a step's prediction and its limit.

With an error of 3 % that is less than `_SAFETY` leaves. A stream that was late too often is given up; if every gap
counts, one late step in 100 is too many.
"""

_LEAD = 0.15
"""Under `paced`, this share of every gap is saved until `_MAX_BANK` gaps are. A step that spent all slack would make
tokens late at any noise.
"""

_MAX_BANK = 1.5
_MAX_LATE_SHARE, _MIN_LATE = 0.02, 3  # beyond both, a request has missed its targets under `paced`

_MAX_LATE = 16
"""Under `gap`, late tokens beyond those in time with which a request has missed its target.

Most of its gaps are too long then. Before, each further gap counts: on a CPU whose steps vary by 15 %, 2 % of the
tokens are late at times.
"""

_OF_LATE, _MAX_RELAXED = 2.0, 4.0
"""Then the request may have gaps twice as long as its late ones, 2 to 4 times the target: half of a step is left to
prompts. If it misses those too, it limits no step. Without this second chance, one slow second of the device left
streams with gaps of four times their target until their end."""

_RETRY_TOKENS = 128
"""The target counts again after this many tokens in time."""

_NEVER = math.inf
_AGE_OF_TOKEN_S = 0.02  # best effort: each token to compute places a request this much later
_AHEAD_S = 2.0**32  # places a request ahead of all others; leaves microseconds of a float


class Lane(IntEnum):
    """ON_TIME: can still meet its targets. BEST_EFFORT: has none, or has missed them."""

    ON_TIME = 0
    BEST_EFFORT = 1


@dataclass(slots=True)
class Pace:
    """The latency state of one request.

    `lane` and `key` are its place in the queue: they change only while it is not queued.

    Attributes:
        lane: served in time, or as best effort.
        key: place within the lane, lowest first: when its next token is due, or its arrival if it is best effort.
        due_s: when the first token is due; inf: never.
        gap_s: longest gap in time: the inter-token target, or more after too many late tokens; inf: none.
        is_paced: whether gaps are judged by schedule.
        when_infeasible: what happens if it cannot be in time.
        value: of its targets being met.
        is_judged: whether a token of it, here or on another engine, has been judged.
        is_timed: whether its next token is due at all.
        next_due_s: when the step that yields its next token must end; inf: never.
        num_late: tokens that came late; under `gap` each token in time since then takes one away.
        num_uncached_tokens: tokens to compute when it is admitted, as far as known.
        answer_s: device time that its answer is expected to cost from now on; only known of requests on time.
        is_steady: whether a token that is in time only sets `next_due_s` to `gap_s` after it; see `note_tokens`.
    """

    lane: Lane
    key: float
    due_s: float
    gap_s: float
    is_paced: bool
    when_infeasible: WhenInfeasible
    value: float
    is_judged: bool
    is_timed: bool
    next_due_s: float = _NEVER
    num_late: int = 0
    num_uncached_tokens: int = 0
    answer_s: float = 0.0
    is_steady: bool = False
    _schedule_s: float = _NEVER  # under `paced`: when the next token counts as late
    _bank: float = 0.0  # gaps saved
    _late_at: int = 0  # under `gap`: the last late token
    _target_s: float = _NEVER  # under `gap`: the inter-token target while `gap_s` is longer

    def note_token(self, now_s: float, num_tokens: int) -> None:
        """Judges a token that came at `now_s`, the `num_tokens`-th of the answer, and sets when the next one is due."""
        if not self.is_judged:
            self.is_judged = True
            self.is_steady = not self.is_paced
            if now_s > self.due_s:
                self.miss()
                return
            self._schedule_s = now_s
        elif now_s > (self._schedule_s if self.is_paced else self.next_due_s):
            self._note_late(now_s, num_tokens)
            if not self.is_timed:
                return
        gap_s = self.gap_s
        if gap_s == _NEVER:
            self.is_timed = False
            return
        if not self.is_paced:
            if gap_s > self._target_s and num_tokens - self._late_at > _RETRY_TOKENS:
                self.gap_s, self._target_s, self.is_steady, self.num_late = self._target_s, _NEVER, True, 0
            self.next_due_s = now_s + self.gap_s
            return
        self._schedule_s += gap_s
        self._bank = min(_MAX_BANK, self._bank + _LEAD)
        self.next_due_s = max(self._schedule_s - self._bank * gap_s, now_s + 0.5 * gap_s)

    def _note_late(self, now_s: float, num_tokens: int) -> None:
        """Counts a late token, and relaxes the target or gives the request up if there were too many."""
        if self.is_paced:
            self.num_late += 1
            is_missed = self.num_late > max(_MIN_LATE, _MAX_LATE_SHARE * num_tokens)
        else:
            num_in_time = max(0, num_tokens - self._late_at - 1)
            self.num_late = max(0, self.num_late - num_in_time) + 1
            self._late_at = num_tokens
            is_missed = self.num_late > _MAX_LATE
            if is_missed and self._target_s == _NEVER:
                self._relax(now_s)
                return
        if is_missed:
            self.miss()

    def _relax(self, now_s: float) -> None:
        """Makes it best effort with longer gaps; its last token came late at `now_s`."""
        target_s = self._target_s = self.gap_s
        late_s = now_s - (self.next_due_s - target_s)
        self.gap_s = min(_MAX_RELAXED * target_s, _OF_LATE * late_s)
        self.lane, self.is_steady, self.num_late = Lane.BEST_EFFORT, False, 0

    def resume(self, now_s: float) -> None:
        """Starts the schedule anew after a pause that the client caused."""
        if self.is_judged and self.is_timed:
            self.next_due_s = self._schedule_s = now_s + self.gap_s
            self._bank = 0.0

    def miss(self) -> None:
        """Makes it best effort: it holds up nothing any more."""
        self.lane, self.is_timed, self.next_due_s = Lane.BEST_EFFORT, False, _NEVER


def note_tokens(requests: Iterable[Request], rows: Iterable[ScheduledRow], now_s: float) -> None:
    """Judges one token of each request whose row samples; see `Pace.note_token`."""
    for request, row in zip(requests, rows, strict=True):
        pace = request.pace
        if pace is None or not pace.is_timed or not row[4]:  # row.samples
            continue
        if pace.is_steady and now_s <= pace.next_due_s:  # nearly all tokens: without a call, 256 times per step
            pace.next_due_s = now_s + pace.gap_s
        else:
            pace.note_token(now_s, len(request.output_ids))


def pace_of(request: Request) -> Pace:
    """Returns the latency state of a request that arrives.

    A request that moved here with output, whose client waits in the middle of an answer, goes ahead of others.
    """
    targets = request.targets or LatencyTargets()
    has_begun = bool(request.output_ids)
    gap_s = _NEVER if targets.inter_token_s is None else targets.inter_token_s
    due_s = _NEVER if targets.ttft_s is None else request.arrival_s + targets.ttft_s
    is_timed = min(due_s, gap_s) < _NEVER
    if has_begun and is_timed:
        due_s = min(due_s, request.arrival_s + gap_s)
    pace = Pace(
        Lane.BEST_EFFORT if due_s == _NEVER else Lane.ON_TIME,
        due_s,
        due_s,
        gap_s,
        targets.pacing is Pacing.PACED,
        targets.when_infeasible,
        targets.value,
        has_begun,
        is_timed,
        num_uncached_tokens=request.num_tokens,
    )
    if has_begun:
        pace.is_steady = not pace.is_paced
        pace.resume(request.arrival_s)
    if pace.lane is Lane.BEST_EFFORT:
        pace.key = best_effort_key(request)
    return pace


def best_effort_key(request: Request) -> float:
    """Returns the place among best-effort requests: by age and length, and those in the middle of an answer first.

    Short requests go first, but a long one is only overtaken by those that arrive within 20 ms per token of its own.
    By age alone, long prompts make all others wait when there is too much best effort.
    """
    age_s = request.arrival_s - request.waited_s + _AGE_OF_TOKEN_S * request.num_tokens
    return age_s - (_AHEAD_S if request.output_ids else 0.0)


class Slack(NamedTuple):
    """How long the next step may last because of running requests.

    Attributes:
        allowed_s: seconds from its start; inf: no limit. Negative: a token is late already.
        min_slack_s: seconds from its start until the first token is due; inf: none is.
        min_gap_s: least inter-token target; inf: none.
        num_kv_tokens: context of their rows.
    """

    allowed_s: float
    min_slack_s: float
    min_gap_s: float
    num_kv_tokens: int


def slack_of(
    requests: Iterable[Request], start_s: float, *, is_ahead: bool, margins: tuple[float, float] = (1.0, 1.0)
) -> Slack:
    """Returns the tightest slack of requests that have a row in the next step.

    Args:
        requests: with the row of the next step scheduled.
        start_s: when that step is expected to start.
        is_ahead: whether a step is in flight. A request with a row in it gets a token at `start_s`; what the next step
            yields is the token after it.
        margins: most of its slack that a step may use, by `Pace.is_paced`; see `StepTimeModel.margin`.
    """
    if_gap_s = if_paced_s = min_gap_s = _NEVER  # when the first token is due, by `Pace.is_paced`
    num_kv_tokens = 0
    for request in requests:
        num_kv_tokens += request.num_computed_tokens
        pace = request.pace
        if pace is None or not pace.is_timed:
            continue
        gap_s, due_s = pace.gap_s, pace.next_due_s
        if is_ahead and request.num_pending_tokens > 1:
            due_s = (due_s if pace.is_paced and due_s < _NEVER else start_s) + gap_s
        if gap_s < min_gap_s:
            min_gap_s = gap_s
        if not pace.is_paced:
            if due_s < if_gap_s:
                if_gap_s = due_s
        elif due_s < if_paced_s:
            if_paced_s = due_s
    slacks_s = (if_gap_s - start_s, if_paced_s - start_s)
    shares = map(min, _SAFETY, margins)
    allowed_s = min(slack_s * share for slack_s, share in zip(slacks_s, shares, strict=True))
    return Slack(allowed_s, min(slacks_s), min_gap_s, num_kv_tokens)
