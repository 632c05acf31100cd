"""The device's speed from one step to the next.

A device that shares its cores, its memory or its power has slow spells of a few steps, too short for the filter of
`step_time.py`, which must not follow noise. They show in its residuals: on a shared machine with two cores the
residuals of successive steps correlate by 0.8, on a device of its own they do not. A first-order autoregression, whose
coefficient is estimated from the residuals themselves, predicts the next one, and nothing where there is nothing to
predict.
"""

import math

_WEIGHT = 0.02  # of a step in the running moments
_CLIP = 3.0  # residuals are clipped at this many standard deviations
_START_DEVIATION, _MIN_DEVIATION = 0.25, 0.02
_MAX_CORRELATION = 0.95
_MIN_FACTOR, _MAX_FACTOR = 0.5, 2.0


class Drift:
    """How much longer than the step-time model says the next step is expected to take.

    Attributes:
        factor: of the next step's duration, within [1/2, 2].
        residual: relative residual of the last step, clipped.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.residual = 0.0
        self._covariance = 0.0
        self._variance = _START_DEVIATION**2

    def note(self, residual: float, known: float) -> None:
        """Learns from a step.

        Args:
            residual: its duration relative to the model's prediction, minus 1; not of a stall.
            known: `residual` when it was planned, one step earlier or two.
        """
        bound = _CLIP * max(_MIN_DEVIATION, math.sqrt(self._variance))
        residual = max(-bound, min(bound, residual))
        self._covariance += _WEIGHT * (residual * known - self._covariance)
        self._variance += _WEIGHT * (residual * residual - self._variance)
        correlation = self._covariance / max(self._variance, _MIN_DEVIATION**2)
        self.residual = residual
        expected = max(0.0, min(_MAX_CORRELATION, correlation)) * residual
        self.factor = max(_MIN_FACTOR, min(_MAX_FACTOR, 1.0 + expected))
