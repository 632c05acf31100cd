"""Fits the five coefficients of a step's duration to measured steps, and states the error on steps it has not seen.

Relative errors are minimized, since a step of 2 ms counts as much as one of 2 s, with Huber weights (Huber 1964): a
step that was disturbed weighs less. No coefficient is negative. Without a knee a one-token row may be cheaper or dearer
than a prompt token, so both are fitted apart. Of all knees the one with the least mean error is taken.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.core.latency.step_time import Coefficients, StepTimeModel, StepTimePrior
from loadgen.errors import OptionError
from loadgen.measure.quantiles import quantiles
from loadgen.simulation.step_log import TimedStep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MIN_STEPS = 50
TRAINING_SHARE = 0.6
_KNEES = (0, *(16 * 2 ** (power / 2) for power in range(14)))  # to 1,448 tokens
_HUBER = 0.1  # relative error beyond which a step weighs less
_ROUNDS = 8
_NUM_TERMS = 5
_MEDIAN_OF_NORMAL = 0.6745  # median of the absolute value of a standard normal


class Fit(NamedTuple):
    """A fitted cost.

    Attributes:
        cost: in the form of the engine's model; `row_s` is negative if a one-token row is cheaper than a prompt token.
        num_training, num_test: steps; the first ones trained it.
        training_error, test_error: relative errors (p50, p90, p99).
        noise: standard deviation of the logarithm of steps around the fit, from the median error, so that a few stalls
            do not count.
        time_ratio: time of all training steps over that which `cost` gives them: disturbed steps weigh little in the
            fit, but take their time.
        mean_cost: the cost whose steps, with `noise`, take the time of the training steps on average.
    """

    cost: StepTimePrior
    num_training: int
    num_test: int
    training_error: tuple[float, ...]
    test_error: tuple[float, ...]
    time_ratio: float

    @property
    def mean_cost(self) -> StepTimePrior:
        """See above."""
        factor = self.time_ratio / math.exp(self.noise**2 / 2)  # the mean of log-normal noise
        return StepTimePrior(Coefficients(*(factor * value for value in self.cost.coefficients)), self.cost.knee_tokens)

    @property
    def noise(self) -> float:
        """See above."""
        return self.training_error[0] / _MEDIAN_OF_NORMAL


def fit_steps(steps: Sequence[TimedStep]) -> Fit:
    """Fits to the first steps, and tests with the others.

    Raises: OptionError: there are fewer than `MIN_STEPS` steps.
    """
    if len(steps) < MIN_STEPS:
        raise OptionError(f"the step log has {len(steps)} steps of known shape, a fit needs at least {MIN_STEPS}")
    num_training = max(_NUM_TERMS, int(len(steps) * TRAINING_SHARE))
    training, test = steps[:num_training], steps[num_training:]
    costs = [_fit(training, round(knee)) for knee in _KNEES]
    cost = min(costs, key=lambda one: float(np.mean(np.minimum(_errors(one, training), 1.0))))
    return Fit(
        cost, len(training), len(test), fit_errors(cost, training), fit_errors(cost, test), time_ratio(cost, training)
    )


def _fit(steps: Sequence[TimedStep], knee: int) -> StepTimePrior:
    seconds = np.array([step.seconds for step in steps])
    shapes = np.array([step.shape for step in steps], dtype=np.float64)
    tokens, rows, kv_tokens, pairs = shapes.T
    # Rows of more than one token are few: without a knee a row is priced as a one-token row.
    products = np.maximum(tokens, knee) if knee else tokens - rows
    columns = np.stack([np.ones(len(steps)), products, rows, kv_tokens, pairs], axis=1) / seconds[:, None]
    weights = np.ones(len(steps))
    found = np.zeros(_NUM_TERMS)
    for _ in range(_ROUNDS):
        found = _non_negative(columns * weights[:, None], weights)
        error = np.abs(columns @ found - 1.0)
        weights = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(error, 1e-12)))
    step_s, token_s, row_s, kv_token_s, pair_s = (float(value) for value in found)
    return StepTimePrior(Coefficients(step_s, token_s, row_s if knee else row_s - token_s, kv_token_s, pair_s), knee)


def _non_negative(columns: "Floats", target: "Floats") -> "Floats":
    """Least squares without negative coefficients: with five terms every set of positive ones can be tried."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    scaled = columns / scale
    gram, moment = scaled.T @ scaled, scaled.T @ target
    best, best_gain = np.zeros(_NUM_TERMS), 0.0
    for size in range(1, _NUM_TERMS + 1):
        for chosen in combinations(range(_NUM_TERMS), size):
            terms = list(chosen)
            solved = np.linalg.lstsq(gram[np.ix_(terms, terms)], moment[terms], rcond=None)[0]
            gain = float(moment[terms] @ solved)
            if (solved >= 0).all() and gain > best_gain:
                best, best_gain = np.zeros(_NUM_TERMS), gain
                best[terms] = solved
    solution: Floats = best / scale
    return solution


def _errors(cost: StepTimePrior, steps: Sequence[TimedStep]) -> "Floats":
    model = StepTimeModel(cost)
    return np.array([abs(model.predict_s(step.shape) - step.seconds) / step.seconds for step in steps])


def time_ratio(cost: StepTimePrior, steps: Sequence[TimedStep]) -> float:
    """Returns the time of all steps over that which a cost gives them; NaN without steps."""
    model = StepTimeModel(cost)
    predicted_s = sum(model.predict_s(step.shape) for step in steps)
    return sum(step.seconds for step in steps) / predicted_s if predicted_s else math.nan


def fit_errors(cost: StepTimePrior, steps: Sequence[TimedStep]) -> tuple[float, ...]:
    """Returns the relative errors on steps, (p50, p90, p99); empty without steps."""
    return tuple(quantiles(_errors(cost, steps), (0.5, 0.9, 0.99))) if steps else ()
