"""Solves for the prior of the step-time model from a few measured steps.

The knee is the best of a fixed list, because the duration is not linear in it. For each knee the coefficients are the
non-negative least squares of the relative errors. With five terms every choice of positive terms can be tried, so the
solution is exact and needs no iteration.
"""

from collections.abc import Sequence
from itertools import combinations

from engine.core.latency.step_time import Coefficients, StepShape, StepTimePrior

MIN_SAMPLES = 5

_KNEES = (0, *sorted({round(1.25**power) for power in range(3, 31)}))  # to 808 tokens
_MIN_SHARE = 0.01  # a term without effect gets this share of the step where it is largest; see `_raised`
_NUM_TERMS = 5


def solve_prior(samples: Sequence[tuple[StepShape, float]]) -> StepTimePrior:
    """Returns the prior that fits the samples best.

    Args:
        samples: shapes and their durations in seconds. They should vary in all that a shape has: one row, all rows,
            short and long prompt chunks, one of them at a large offset.
    Raises: ValueError: fewer than 5 samples, or a duration that is not positive.
    """
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples, a prior needs at least {MIN_SAMPLES}")
    for shape, elapsed_s in samples:
        if not elapsed_s > 0.0:
            raise ValueError(f"a step of {shape.num_tokens} tokens took {elapsed_s} s, must be positive")
    fits = ((*_fit(samples, knee), knee) for knee in _KNEES)
    _, coefficients, knee = min(fits, key=lambda fit: fit[0])
    return StepTimePrior(_raised(coefficients, knee, samples), knee)


def _fit(samples: Sequence[tuple[StepShape, float]], knee: int) -> tuple[float, list[float]]:
    """Returns the sum of squared relative errors and the coefficients, for this knee."""
    columns = [[feature / elapsed_s for feature in _features(shape, knee)] for shape, elapsed_s in samples]
    scales = [max(row[i] for row in columns) or 1.0 for i in range(_NUM_TERMS)]
    rows = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in columns]
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(_NUM_TERMS)] for i in range(_NUM_TERMS)]
    target = [sum(row[i] for row in rows) for i in range(_NUM_TERMS)]
    best_error, best = float(len(samples)), [0.0] * _NUM_TERMS
    for size in range(1, _NUM_TERMS + 1):
        for terms in combinations(range(_NUM_TERMS), size):
            solved = _solve([[gram[i][j] for j in terms] for i in terms], [target[i] for i in terms])
            if solved is None or min(solved) < 0.0:
                continue
            values = [0.0] * _NUM_TERMS
            for term, value in zip(terms, solved, strict=True):
                values[term] = value
            error = sum((sum(v * x for v, x in zip(values, row, strict=True)) - 1.0) ** 2 for row in rows)
            if error < best_error:
                best_error, best = error, values
    return best_error, [value / scale for value, scale in zip(best, scales, strict=True)]


def _raised(coefficients: Sequence[float], knee: int, samples: Sequence[tuple[StepShape, float]]) -> Coefficients:
    """Raises coefficients to a small positive value: the filter multiplies them, and could never raise a zero."""
    raised = []
    for term, coefficient in enumerate(coefficients):
        largest = max(_features(shape, knee)[term] / elapsed_s for shape, elapsed_s in samples)
        raised.append(max(coefficient, _MIN_SHARE / largest) if largest > 0.0 else coefficient)
    return Coefficients(*raised)


def _features(shape: StepShape, knee: int) -> tuple[float, ...]:
    return (1.0, max(shape.num_tokens, knee), shape.num_rows, shape.num_kv_tokens, shape.num_pairs)


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Solves a small symmetric system by Gaussian elimination; None if it is singular. Overwrites its arguments."""
    size = len(vector)
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda row: abs(matrix[row][pivot]))
        if abs(matrix[best][pivot]) < 1e-12:
            return None
        matrix[pivot], matrix[best] = matrix[best], matrix[pivot]
        vector[pivot], vector[best] = vector[best], vector[pivot]
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            if factor:
                for column in range(pivot, size):
                    matrix[row][column] -= factor * matrix[pivot][column]
                vector[row] -= factor * vector[pivot]
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * vector[column] for column in range(row + 1, size))
        vector[row] = (vector[row] - known) / matrix[row][row]
    return vector
