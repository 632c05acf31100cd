"""How busy one engine is, in tokens: what this process knows at once of its own requests, and what the engine says of
everybody's. Pure.
"""

from typing import NamedTuple


class EngineLoad(NamedTuple):
    """One engine's load now.

    Attributes:
        num_requests: that it has.
        num_waiting_tokens: of prompts that are not computed yet.
        num_free_tokens: that its cache has room for.
    """

    num_requests: int = 0
    num_waiting_tokens: int = 0
    num_free_tokens: int = 1 << 60


class LoadEstimate:
    """Adds up our own requests, exact at any moment, and those of other frontends, as of the engine's last news.

    What the engine says counts ours too, as of a moment ago; what is more than ours now must be somebody else's.
    """

    def __init__(self) -> None:
        self._others = EngineLoad()

    def note(self, told: EngineLoad, *, num_own_requests: int, num_own_tokens: int) -> None:
        """Takes what the engine says of all requests.

        Args:
            num_own_requests: ours there now.
            num_own_tokens: prompt tokens of these without a first token.
        """
        self._others = EngineLoad(
            max(told.num_requests - num_own_requests, 0),
            max(told.num_waiting_tokens - num_own_tokens, 0),
            told.num_free_tokens,
        )

    def now(self, *, num_own_requests: int, num_own_tokens: int) -> EngineLoad:
        """The load, with what is ours now."""
        others = self._others
        return EngineLoad(
            others.num_requests + num_own_requests, others.num_waiting_tokens + num_own_tokens, others.num_free_tokens
        )
