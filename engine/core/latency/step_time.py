"""Predicts how long a step takes from what it computes, and corrects itself with every step that was measured.

    duration = step_s + token_s * max(num_tokens, knee) + row_s * num_rows
               + kv_token_s * num_kv_tokens + pair_s * num_pairs

Below the knee a step is bound by reading the weights, so more tokens cost nothing. `num_pairs` is the attention of
prompt chunks, without which a long prompt looks half as expensive as it is.

The five coefficients are those of a prior, measured at the start (`step_time_prior.py`), times five multipliers. A
Kalman filter (Kalman 1960) estimates the multipliers as random walks from relative residuals. Its covariance is bounded
by construction: an estimator with a forgetting factor winds up in long runs of equal steps and diverges. Residuals are
clipped at a multiple of their running mean, so that a stall does not move the model. Pure: durations are passed in.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.core.outputs import SchedulerOutput


class StepShape(NamedTuple):
    """What a step computes.

    Attributes:
        num_tokens: tokens of all rows.
        num_rows: rows.
        num_kv_tokens: context of the one-token rows, summed; their own tokens included.
        num_pairs: pairs of query and key of the longer rows, summed.
    """

    num_tokens: int
    num_rows: int
    num_kv_tokens: int
    num_pairs: int


class Coefficients(NamedTuple):
    """Seconds per step, per token, per row, per token of context of one-token rows, and per pair of query and key."""

    step_s: float
    token_s: float
    row_s: float
    kv_token_s: float
    pair_s: float


class StepTimePrior(NamedTuple):
    """Coefficients before any observation, and the number of tokens below which tokens cost nothing; 0: none."""

    coefficients: Coefficients
    knee_tokens: int = 0


ERROR_BOUNDS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Upper bounds of the histogram buckets of relative errors; a last bucket is unbounded."""

_NUM_BUCKETS = len(ERROR_BOUNDS) + 1


class StepTimeErrors(NamedTuple):
    """Predictions made since the start, by relative error: one count per bucket of `ERROR_BOUNDS`. Stalls are apart.

    Attributes:
        decode: of steps whose rows have one token each.
        prompt: of the others.
        decode_sum, prompt_sum: of their relative errors.
        num_stalls: steps that took far longer than predicted and are in neither histogram.
    """

    decode: tuple[int, ...] = (0,) * _NUM_BUCKETS
    prompt: tuple[int, ...] = (0,) * _NUM_BUCKETS
    decode_sum: float = 0.0
    prompt_sum: float = 0.0
    num_stalls: int = 0

    def quantile(self, share: float) -> float:
        """Returns the relative error that `share` of all predictions do not exceed, interpolated within its bucket.

        0 without predictions. An error beyond the last bound counts as the last bound.
        """
        counts = [decode + prompt for decode, prompt in zip(self.decode, self.prompt, strict=True)]
        num_left, low = share * sum(counts), 0.0
        for count, high in zip(counts, ERROR_BOUNDS, strict=False):
            if count >= num_left:
                return low + (high - low) * num_left / count if count else low
            num_left -= count
            low = high
        return low


_MIN_MULTIPLIER, _MAX_MULTIPLIER = 0.25, 4.0
_START_VARIANCE = 0.05  # of a multiplier, and its bound
_WALK_VARIANCE = 2e-6  # added to it per step
_NOISE_VARIANCE = 0.03**2  # of a relative residual
_CLIP = 3.0  # residuals are clipped at this many times their running mean
_STALL = 12.0  # and are a stall beyond this many
_MEAN_STEP = 0.02  # weight of a residual in the running mean
_MIN_MEAN = 0.02
_START_MEAN = 0.25  # so that a wrong prior is corrected, and not taken for a series of stalls
_DEVIATION_OF_EXCESS = 2.5066  # standard deviation of a normal error, as a multiple of the mean of its positive part


class StepTimeModel:
    """The five coefficients, corrected online.

    Use: `predict_s` or `coefficients` when a step is planned; `observe` with its duration, off the critical path.

    Invariants: every multiplier is within [1/4, 4]; every variance is within (0, 0.05]; the covariance is symmetric.
    """

    def __init__(self, prior: StepTimePrior) -> None:
        self.knee_tokens = prior.knee_tokens
        self._prior = prior.coefficients
        self._multipliers = [1.0] * 5
        self._covariance = [[_START_VARIANCE if i == j else 0.0 for j in range(5)] for i in range(5)]
        self._mean_residual = _START_MEAN
        self._mean_excess = 0.0  # of steps that took longer than predicted
        self._decode_errors = [0] * _NUM_BUCKETS
        self._prompt_errors = [0] * _NUM_BUCKETS
        self._decode_error_sum = self._prompt_error_sum = 0.0
        self._num_stalls = 0
        self.coefficients = prior.coefficients

    @property
    def errors(self) -> StepTimeErrors:
        """Errors of the predictions so far; each was made before its own step was observed."""
        return StepTimeErrors(
            tuple(self._decode_errors),
            tuple(self._prompt_errors),
            self._decode_error_sum,
            self._prompt_error_sum,
            self._num_stalls,
        )

    def margin(self, num_deviations: float) -> float:
        """Returns the share of a limit that a step may be predicted to take; at most 1.

        Args:
            num_deviations: standard deviations of the error by which a step may be late and still keep the limit.
        """
        return 1.0 / (1.0 + num_deviations * _DEVIATION_OF_EXCESS * self._mean_excess)

    def predict_s(self, shape: StepShape) -> float:
        """Returns the expected duration of a step, in seconds."""
        step_s, token_s, row_s, kv_token_s, pair_s = self.coefficients
        num_tokens, num_rows, num_kv_tokens, num_pairs = shape
        return (
            step_s
            + token_s * max(num_tokens, self.knee_tokens)
            + row_s * num_rows
            + kv_token_s * num_kv_tokens
            + pair_s * num_pairs
        )

    def prompt_s(self, num_tokens: int, num_pairs: int) -> float:
        """Returns the expected seconds of prompt tokens with their attention, apart from the step they are in."""
        return self.coefficients.token_s * num_tokens + self.coefficients.pair_s * num_pairs

    def is_stall(self, predicted_s: float, elapsed_s: float) -> bool:
        """Whether a step took so much longer than predicted that this says nothing of the next ones."""
        return elapsed_s / predicted_s - 1.0 > _STALL * max(self._mean_residual, _MIN_MEAN)

    def observe(self, shape: StepShape, elapsed_s: float, drift: float = 1.0) -> None:
        """Learns from a step.

        Args:
            shape: what it computed.
            elapsed_s: its duration; ignored if not positive.
            drift: factor on the prediction with which it was planned. Errors are those of the product.
        """
        if elapsed_s <= 0.0:
            return
        num_tokens, num_rows, num_kv_tokens, num_pairs = shape
        c0, c1, c2, c3, c4 = self.coefficients
        terms = (
            c0, c1 * max(num_tokens, self.knee_tokens), c2 * num_rows, c3 * num_kv_tokens, c4 * num_pairs
        )  # fmt: skip
        predicted_s = sum(terms)
        residual = elapsed_s / predicted_s - 1.0
        mean = max(self._mean_residual, _MIN_MEAN)
        if self.is_stall(predicted_s * drift, elapsed_s):
            self._num_stalls += 1
        else:
            error = abs(elapsed_s - predicted_s * drift) / elapsed_s
            bucket = sum(error > bound for bound in ERROR_BOUNDS)
            if num_tokens > num_rows:
                self._prompt_errors[bucket] += 1
                self._prompt_error_sum += error
            else:
                self._decode_errors[bucket] += 1
                self._decode_error_sum += error
        clipped = max(-_CLIP * mean, min(_CLIP * mean, residual))
        excess = min(_CLIP * mean, elapsed_s / (predicted_s * drift) - 1.0)
        self._mean_residual += _MEAN_STEP * (abs(clipped) - self._mean_residual)
        self._mean_excess += _MEAN_STEP * (max(excess, 0.0) - self._mean_excess)
        multipliers = self._multipliers
        shares = [term / (multiplier * predicted_s) for term, multiplier in zip(terms, multipliers, strict=True)]
        self._correct(shares, clipped)

    def _correct(self, gradient: list[float], residual: float) -> None:
        """Updates the filter with one residual; `gradient` is that of the relative prediction in the multipliers."""
        g0, g1, g2, g3, g4 = gradient
        covariance, multipliers, prior = self._covariance, self._multipliers, self._prior
        gains = [r[0] * g0 + r[1] * g1 + r[2] * g2 + r[3] * g3 + r[4] * g4 for r in covariance]
        p0, p1, p2, p3, p4 = gains
        scale = 1.0 / (_NOISE_VARIANCE + p0 * g0 + p1 * g1 + p2 * g2 + p3 * g3 + p4 * g4)
        for i, row in enumerate(covariance):
            gain = gains[i]
            row[0] -= gain * p0 * scale  # gain * p first: symmetric to the last bit
            row[1] -= gain * p1 * scale
            row[2] -= gain * p2 * scale
            row[3] -= gain * p3 * scale
            row[4] -= gain * p4 * scale
            row[i] = min(row[i] + _WALK_VARIANCE, _START_VARIANCE)
            multiplier = multipliers[i] + gain * scale * residual
            multipliers[i] = max(_MIN_MULTIPLIER, min(_MAX_MULTIPLIER, multiplier))
        m0, m1, m2, m3, m4 = multipliers
        a, b, c, d, e = prior
        self.coefficients = Coefficients(a * m0, b * m1, c * m2, d * m3, e * m4)


def attention_pairs(num_tokens: int, num_computed_tokens: int) -> int:
    """Returns the pairs of query and key of a chunk behind `num_computed_tokens` of its prompt."""
    return num_tokens * num_computed_tokens + num_tokens * (num_tokens + 1) // 2


def shape_of(plan: "SchedulerOutput") -> StepShape:
    """Returns what a planned step computes."""
    num_kv_tokens = num_pairs = num_narrow = 0
    rows = plan.rows
    for row in rows:  # one-token rows come first
        num_tokens = row[1]
        if num_tokens > 1:
            break
        num_kv_tokens += row[2]
        num_narrow += 1
    for row in rows[num_narrow:]:
        num_pairs += attention_pairs(row[1], row[2])
    return StepShape(plan.num_tokens, len(rows), num_kv_tokens + num_narrow, num_pairs)
