"""What a mock server says and when: times that are known exactly, because they were chosen.

Pure: numbers in, numbers out; the servers keep to it. An answer's clock stands still while the server is stalled, as
that of an engine that hangs does, and then goes on where it was.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.errors import OptionError
from loadgen.target.probe import NUM_PROBE_TOKENS

NEVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MockBehaviour:
    """How a mock server answers; checked when created.

    Attributes:
        ttft_s: from a request's arrival to its first message, which carries one token.
        itl_s: from token to token.
        jitter: each gap is drawn evenly from itl_s * (1 - jitter) to itl_s * (1 + jitter); 0 to 1.
        tokens_per_message: of the later messages, each of which leaves when the last of its tokens is due.
        stall_at_s: when all answers stand still, seconds after the first request that is no probe.
        stall_s: for how long; 0 is never.
        error_rate: share of requests that fail, half of them at once, half in mid-answer; 0 to 1.
        output_share: share of the tokens asked for that come; above 0, at most 1.
        cached_share: share of each prompt that is said to have been cached; 0 to 1.
        spares_probes: requests for at most 4 tokens, as probes make, get all of them and do not fail.
        role_first: chat answers begin with a message that has a role and no token.
        counts_as_it_goes: HTTP answers carry their usage in every message, if the client asks for it.
        overhead_tokens: what the server adds to a prompt of text.
        long_word: words with more letters than this are two tokens.
        model, max_model_len, vocab_size: what it says of itself.
        seed: of jitter and errors.

    Raises: OptionError: a value out of range.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.01
    jitter: float = 0.0
    tokens_per_message: int = 1
    stall_at_s: float = 0.0
    stall_s: float = 0.0
    error_rate: float = 0.0
    output_share: float = 1.0
    cached_share: float = 0.0
    spares_probes: bool = True
    role_first: bool = True
    counts_as_it_goes: bool = True
    overhead_tokens: int = 0
    long_word: int = 100
    model: str = "mock"
    max_model_len: int = 1 << 20
    vocab_size: int = 32_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("jitter", "error_rate", "cached_share", "output_share"):
            if not 0 <= getattr(self, name) <= 1 or (name == "output_share" and not self.output_share):
                raise OptionError(f"{name} is {getattr(self, name)}, must be a share of 1")
        for name in ("ttft_s", "itl_s", "stall_at_s", "stall_s", "overhead_tokens"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}, must not be negative")
        for name in ("tokens_per_message", "long_word", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, must be at least 1")

    def num_text_tokens(self, text: str) -> int:
        """Tokens of a prompt given as text."""
        return self.overhead_tokens + sum(1 + (len(word) > self.long_word) for word in text.split())

    def answer(self, number: int, num_asked: int) -> "MockAnswer":
        """What a request gets.

        Args:
            number: of the request, in order of arrival.
            num_asked: tokens it asks for.
        """
        rng = random.Random(f"{self.seed}/{number}")
        is_spared = self.spares_probes and num_asked <= NUM_PROBE_TOKENS
        num_tokens = num_asked if is_spared else max(1, int(num_asked * self.output_share + 1e-9))
        fails, fails_at_once = rng.random() < self.error_rate, rng.random() < 0.5
        messages = [MockMessage(0, 1, self.ttft_s)]
        due_s, first = self.ttft_s, 1
        for index in range(1, num_tokens):
            due_s += self.itl_s * (1 + self.jitter * rng.uniform(-1, 1))
            if index + 1 - first == self.tokens_per_message or index + 1 == num_tokens:
                messages.append(MockMessage(first, index + 1 - first, due_s))
                first = index + 1
        if fails and not is_spared:
            return MockAnswer(tuple(messages[: 0 if fails_at_once else (len(messages) + 1) // 2]), True)
        return MockAnswer(tuple(messages), False)


class MockMessage(NamedTuple):
    """One message: index of its first token, its tokens, and when it leaves, seconds after the request came."""

    first: int
    num_tokens: int
    due_s: float


class MockAnswer(NamedTuple):
    """The messages of one answer, and whether it fails after them."""

    messages: tuple[MockMessage, ...]
    fails: bool


class Stall(NamedTuple):
    """When the server stood still, in nanoseconds of any clock."""

    start_ns: int
    end_ns: int

    def leaves_ns(self, arrived_ns: int, due_s: float) -> int:
        """When a message leaves that was due so long after its request arrived."""
        due_ns = round(due_s * 1e9)
        if arrived_ns >= self.end_ns or arrived_ns + due_ns < self.start_ns:
            return arrived_ns + due_ns
        return self.end_ns + due_ns - max(self.start_ns - arrived_ns, 0)
