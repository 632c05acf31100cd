"""What the engines' load says about the first token of a request that would come now. Pure."""

from typing import NamedTuple


class EngineForecast(NamedTuple):
    """What is needed to predict a first token on one engine.

    Attributes:
        tokens_per_second: prompt tokens it computes while prompts wait; 0: not measured.
        num_tokens_ahead: waiting prompt tokens that are due earlier, or at the same time.
        step_s: duration of its last step.
        min_step_s: shortest step that its step-time model allows; 0: there is no model.
    """

    tokens_per_second: float
    num_tokens_ahead: float
    step_s: float
    min_step_s: float = 0.0

    def first_token_s(self, num_tokens: float, computed_share: float = 1.0) -> float:
        """Returns the predicted seconds to a first token; the rate must be above 0.

        An arrival waits for half a step on average, and its last chunk takes a whole one.

        Args:
            num_tokens: of the prompt.
            computed_share: part of prompt tokens that is not found in the prefix cache.
        """
        tokens = (self.num_tokens_ahead + num_tokens) * computed_share
        return tokens / self.tokens_per_second + 1.5 * self.step_s


class FleetForecast(NamedTuple):
    """The engines that a new request may go to."""

    engines: tuple[EngineForecast, ...]

    @property
    def tokens_per_second(self) -> float:
        """Rate of all engines together; 0 if one is not measured, because nothing can be predicted then."""
        if any(engine.tokens_per_second <= 0 for engine in self.engines):
            return 0.0
        return sum(engine.tokens_per_second for engine in self.engines)

    @property
    def min_step_s(self) -> float:
        """Shortest step of any engine."""
        return min((engine.min_step_s for engine in self.engines), default=0.0)

    def first_token_s(self, num_tokens: float, computed_share: float = 1.0) -> float:
        """Returns the seconds to the first token on the engine where it comes first; see EngineForecast."""
        return min(engine.first_token_s(num_tokens, computed_share) for engine in self.engines)

    def alone_s(self, num_tokens: float, computed_share: float = 1.0) -> float:
        """Returns the seconds to the first token if nothing were ahead."""
        idle = (engine._replace(num_tokens_ahead=0.0) for engine in self.engines)
        return min(engine.first_token_s(num_tokens, computed_share) for engine in idle)
