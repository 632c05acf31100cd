"""Steps in time: when those in flight are expected to end, and how fast the engine has been.

Rates are measured while there is something to measure. They contain decodes, the step budget and whatever slows the
device down, and so hold where the step-time model does not.
"""

import math
from collections import deque
from typing import NamedTuple

from engine.core.latency.drift import Drift
from engine.core.latency.moving_rate import MovingRate
from engine.core.latency.step_time import StepShape, StepTimeModel, StepTimePrior

_PROMPT_RATE_S, _END_RATE_S = 1.0, 5.0  # time constants of moving averages
_STALE_S = 1.0  # what was measured longer ago may have been a stall


class _PlannedStep(NamedTuple):
    """A step in flight.

    Attributes:
        shape: what it computes.
        planned_s: when it was planned.
        predicted_s: expected duration by the model.
        drift: factor by which the device was expected to be slower than the model.
        known: relative residual of the last step that was known then.
        num_prompt_tokens: prompt tokens but one per row, if there was no time for more; otherwise 0, because they tell
            nothing of the rate.
        prompt_s: seconds that these take by the model, with their attention.
    """

    shape: StepShape
    planned_s: float
    predicted_s: float
    drift: float
    known: float
    num_prompt_tokens: int
    prompt_s: float


class StepClock:
    """Follows the steps from plan to result, and teaches the step-time model.

    Use: `plan` and `collect` for every step, those without rows too; `learn` off the critical path.
    """

    def __init__(self, prior: StepTimePrior) -> None:
        self.model = StepTimeModel(prior)
        self._steps: deque[_PlannedStep] = deque()  # in flight
        self._prompt_rate = MovingRate(_PROMPT_RATE_S)
        self._prompt_speed = MovingRate(_PROMPT_RATE_S)  # see `expected_pace`
        self._end_rate = MovingRate(_END_RATE_S)
        self._busy_until_s = 0.0  # when the steps in flight are expected to end
        self._collected_s = 0.0  # when the last step with rows ended
        self._model_speed = MovingRate(_PROMPT_RATE_S)  # expected seconds of all steps, per second
        self._speed_measured_s = float("-inf")
        self._last_step_s = 0.0
        self._drift = Drift()
        self._observed: tuple[StepShape, float, float] | None = None  # with its drift; not learned yet

    @property
    def has_steps(self) -> bool:
        """Whether steps are in flight."""
        return bool(self._steps)

    @property
    def drift(self) -> float:
        """How many times longer than the model says the next step is expected to take; see `drift.py`."""
        return self._drift.factor

    @property
    def ends_per_s(self) -> float | None:
        """Running requests that end per second of steps; None: none has ended lately."""
        return self._end_rate.per_s or None

    def prompt_tokens_per_s(self, now_s: float, free_share: float) -> float:
        """Returns the prompt tokens computed per second while prompts wait for their time; 0: not measured yet.

        A measurement older than `_STALE_S` may have been of a stall: the estimate of `expected_pace` replaces it.
        """
        measured = self._prompt_rate.per_s
        if measured is None or now_s - self._speed_measured_s <= _STALE_S:
            return measured or 0.0
        speed, _ = self.expected_pace(now_s, math.inf, free_share)
        return speed / self.model.coefficients.token_s

    def start_s(self, now_s: float) -> float:
        """Returns when the step that is planned now is expected to start."""
        return max(now_s, self._busy_until_s) if self._steps else now_s

    def plan(self, shape: StepShape, now_s: float, *, has_backlog: bool) -> None:
        """Notes a planned step.

        Args:
            shape: what it computes; no rows if it only tells the runner of changes.
            now_s: monotonic seconds.
            has_backlog: whether prompts are left over for lack of time or of the token budget, not of slots or blocks.
        """
        predicted_s = self.model.predict_s(shape) if shape.num_rows else 0.0
        num_prompt_tokens = shape.num_tokens - shape.num_rows if has_backlog else 0
        prompt_s = self.model.prompt_s(num_prompt_tokens, shape.num_pairs)
        drift = self._drift
        self._busy_until_s = self.start_s(now_s) + predicted_s * drift.factor
        self._steps.append(
            _PlannedStep(shape, now_s, predicted_s, drift.factor, drift.residual, num_prompt_tokens, prompt_s)
        )

    def collect(self, now_s: float, num_ended: int) -> None:
        """Notes the end of the oldest step in flight, and the running requests that ended since the one before."""
        step = self._steps.popleft()
        if step.shape.num_rows:
            elapsed_s = now_s - max(step.planned_s, self._collected_s)
            self.learn()
            self._observed = (step.shape, elapsed_s, step.drift)
            if step.num_prompt_tokens:
                self._prompt_rate.add(step.num_prompt_tokens, elapsed_s)
                self._prompt_speed.add(step.prompt_s, elapsed_s)
                self._speed_measured_s = now_s
            self._model_speed.add(step.predicted_s, elapsed_s)
            self._end_rate.add(num_ended, elapsed_s)
            is_stall = self.model.is_stall(step.predicted_s * step.drift, elapsed_s)
            self._last_step_s = step.predicted_s if is_stall else elapsed_s
            if not is_stall and elapsed_s > 0.0:
                self._drift.note(elapsed_s / step.predicted_s - 1.0, step.known)
            self._collected_s = now_s
        self._busy_until_s = now_s + sum(step.predicted_s for step in self._steps) * self._drift.factor

    def learn(self) -> None:
        """Corrects the model by the last step that was collected, if that has not happened yet."""
        if self._observed is not None:
            self.model.observe(*self._observed)
            self._observed = None

    def expected_pace(self, now_s: float, max_step_s: float, free_share: float) -> tuple[float, float]:
        """Returns the speed at which prompts are computed and the duration of a step, as a promise may assume them.

        The speed is in seconds of the model per second: 1 if the device does nothing else. In tokens per second a long
        prompt would look as if it had no more attention than the short ones before it.

        Bad values are not kept while nothing is measured: an engine that refuses all because of them would stay idle.

        Args:
            now_s: monotonic seconds.
            max_step_s: of an idle step.
            free_share: of a step that decodes leave to prompts; the speed while none is measured, unless the device is
                slower than the model.
        """
        if now_s - self._collected_s > _STALE_S:
            return free_share, min(self._last_step_s, max_step_s)
        speed = self._prompt_speed.per_s if now_s - self._speed_measured_s <= _STALE_S else None
        return speed or free_share * min(1.0, self._model_speed.per_s or 1.0), self._last_step_s
