"""The governor: how many prompt tokens fit into a step, in seconds rather than tokens.

A step may last until the running request with the least slack needs its next token. What its one-token rows leave of
that time goes to prompts. A fixed token budget cannot do this: the price of a prompt token depends on its offset, on
the model and on the device.
"""

import math

from engine.core.latency.step_time import StepTimeModel, attention_pairs

FLOOR_TOKENS = 64
"""Prompt tokens that every step may compute, so that prompts make progress even if decodes alone exceed the targets."""

FLOOR_SHARE = 1 / 16
"""These tokens take at most this share of the time that the step may last, or of its decodes if they take longer.

On a CPU 64 tokens late in a prompt take longer than all decodes. The share must fit into the margin that steps leave
before a token is due (`pacing.py`): with a quarter, streams whose decodes took three quarters of their target missed
every gap beside a long prompt.
"""

MAX_SLACK_STEPS = 5
"""A step uses at most this many times the longest idle step, however much slack there is: arrivals wait for its end."""


class StepBudget:
    """Time for prompt tokens in one step.

    Use: `max_chunk` before a chunk, `spend` after it. Tokens below the knee of the model cost no time in linear layers:
    the step reads the weights anyway.

    Attributes:
        decode_s: expected duration without prompts.
        room_s: what is left for prompts.
        free_share: share of such steps that prompts have, at least what every step may compute of them.
        num_tokens: prompt tokens so far.
    """

    def __init__(self, model: StepTimeModel, num_rows: int, num_kv_tokens: int, allowed_s: float) -> None:
        """Args: the model; the one-token rows of the step and their context; how long the step may last."""
        step_s, token_s, row_s, kv_token_s, pair_s = model.coefficients
        self._token_s, self._row_s, self._pair_s = token_s, row_s, pair_s
        self.decode_s = step_s + token_s * max(num_rows, model.knee_tokens) + row_s * num_rows
        self.decode_s += kv_token_s * num_kv_tokens
        self.room_s = allowed_s - self.decode_s
        # Without decodes nothing waits for a token, and the constant of the step would be paid for a few.
        self._floor_s = FLOOR_SHARE * max(allowed_s, self.decode_s) if num_rows else math.inf
        floor_s = token_s * FLOOR_TOKENS
        self.free_share = floor_s / (self.decode_s + floor_s)
        if allowed_s > 0.0:
            self.free_share = max(self.free_share, self.room_s / allowed_s)
        self._num_free = max(0, model.knee_tokens - num_rows)
        self.num_tokens = 0

    @property
    def is_spent(self) -> bool:
        """Whether no further prompt token fits."""
        if self.room_s > 0.0:
            return False
        is_floor_spent = self.num_tokens > 0 and self._floor_s < self._row_s + self._token_s
        return self.num_tokens >= FLOOR_TOKENS or is_floor_spent

    def max_chunk(self, num_computed_tokens: int) -> int:
        """Returns the largest chunk that fits, of a prompt with this many tokens computed, or what the floor allows."""
        num_fitting = self._num_fitting(self.room_s - self._row_s, num_computed_tokens)
        num_left = FLOOR_TOKENS - self.num_tokens
        if num_fitting >= num_left:
            return num_fitting
        if self._floor_s == math.inf:
            return num_left
        return max(num_fitting, min(num_left, self._num_fitting(self._floor_s - self._row_s, num_computed_tokens)))

    def _num_fitting(self, room_s: float, num_computed_tokens: int) -> int:
        """Returns how many tokens of a prompt fit into a time.

        A chunk of n tokens costs token_s * (n - free) + pair_s * (n * computed + n * n / 2) <= room, solved for n.
        """
        if room_s <= 0.0:
            return 0
        token_s, pair_s = self._token_s, self._pair_s
        first_s = token_s + pair_s * num_computed_tokens  # of the first token of the chunk
        if self._num_free:
            # What of the chunk is free of linear layers still pays for attention.
            free_s = pair_s * (self._num_free * num_computed_tokens + self._num_free**2 / 2)
            if free_s > room_s:
                first_s -= token_s
            else:
                room_s += token_s * self._num_free
        if pair_s > 0.0:
            num_tokens = (math.sqrt(first_s * first_s + 2.0 * pair_s * room_s) - first_s) / pair_s
        else:
            num_tokens = room_s / first_s
        return int(num_tokens)

    def spend(self, num_tokens: int, num_computed_tokens: int) -> None:
        """Counts a chunk.

        Args:
            num_tokens: its tokens.
            num_computed_tokens: tokens of its prompt that were computed before it.
        """
        num_free = min(self._num_free, num_tokens)
        self._num_free -= num_free
        self.num_tokens += num_tokens
        pairs_s = self._pair_s * attention_pairs(num_tokens, num_computed_tokens)
        seconds = self._token_s * (num_tokens - num_free) + self._row_s + pairs_s
        self.room_s -= seconds
        self._floor_s -= seconds
