"""Estimates the work of a prompt before it is tokenized, from its characters and its model's last prompts. Pure."""

from dataclasses import dataclass

from frontend.generation.prompt_size import CHARS_PER_TOKEN

_GAIN = 0.05
"""Weight of a new prompt in an average: the last 20 or so count. One long prompt does not decide."""

_FULL_WEIGHT_CHARS = 1000
"""Shorter prompts weigh less, in proportion. Most tokens of a greeting are those of the chat template, and say nothing
of a long prompt.
"""


@dataclass(slots=True)
class _Averages:
    tokens_per_char: float = 1 / CHARS_PER_TOKEN
    computed_share: float = 1.0


class TokenEstimate:
    """Averages by model.

    Invariant: at most `max_models` models are remembered, those that were first asked for last.
    """

    def __init__(self, *, max_models: int = 256) -> None:
        self._max_models = max_models
        self._averages: dict[str, _Averages] = {}

    def num_tokens(self, model_name: str, num_chars: int) -> int:
        """Returns the expected tokens of a prompt, at least 1."""
        return max(round(num_chars * self._of(model_name).tokens_per_char), 1)

    def computed_share(self, model_name: str) -> float:
        """Returns the expected part of a prompt's tokens that is not found in the prefix cache."""
        return self._of(model_name).computed_share

    def learn_tokens(self, model_name: str, num_chars: int, num_tokens: int) -> None:
        """Notes how many tokens a prompt of at least one character has."""
        averages = self._of(model_name)
        weight = _GAIN * min(num_chars / _FULL_WEIGHT_CHARS, 1.0)
        averages.tokens_per_char += weight * (num_tokens / num_chars - averages.tokens_per_char)

    def learn_cached(self, model_name: str, num_tokens: int, num_cached: int) -> None:
        """Notes how many tokens of a prompt were found in the prefix cache."""
        averages = self._of(model_name)
        averages.computed_share += _GAIN * (1 - num_cached / num_tokens - averages.computed_share)

    def _of(self, model_name: str) -> _Averages:
        averages = self._averages.get(model_name)
        if averages is None:
            averages = self._averages[model_name] = _Averages()
            if len(self._averages) > self._max_models:
                del self._averages[next(iter(self._averages))]
        return averages
