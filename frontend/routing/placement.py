"""Load balancing: a request goes to the least loaded engine, unless another one has the beginning of its prompt cached
and is not much busier. Pure.

The cost of an engine is a sum in tokens: waiting prompt tokens, EXPECTED_OUTPUT_TOKENS for every request, and the
tokens its cache has no capacity for, minus the tokens of the prompt that it has had before. At most MAX_AFFINITY_TOKENS
of these count, so that a common prefix does not send every request to one engine: MAX_AFFINITY_TOKENS /
EXPECTED_OUTPUT_TOKENS more requests than elsewhere outweigh any prefix. Ties go to the engine chosen longest ago.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.service.engine_protocol import BYTES_PER_TOKEN_ID, EXPECTED_OUTPUT_TOKENS

MAX_AFFINITY_TOKENS = 2048
CHUNK_TOKENS = 64
"""Prefixes are known in these steps; a multiple of the engine's blocks of 16."""

MAX_CHUNKS = 256
"""Of one prompt; what is behind them is not looked at."""

MAX_PREFIXES = 1 << 14
"""Chunks remembered for each engine: a million tokens. The ones not seen for longest are forgotten first."""

_CHUNK_BYTES = CHUNK_TOKENS * BYTES_PER_TOKEN_ID


class EngineLoad(NamedTuple):
    """One engine's load now.

    Attributes:
        num_requests: requests in the engine.
        num_waiting_tokens: prompt tokens that are not computed yet.
        num_free_tokens: tokens that its KV cache has capacity for.
    """

    num_requests: int = 0
    num_waiting_tokens: int = 0
    num_free_tokens: int = 1 << 60


class Candidate(NamedTuple):
    """An engine that could take the request.

    Attributes:
        instance_id: another one means that the engine has lost its cache.
    """

    instance_id: str
    load: EngineLoad


class Placement:
    """Chooses, and remembers what went where.

    Invariant: no more than `max_prefixes` are remembered of any engine, and none of engines that are not candidates.
    """

    def __init__(self, *, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: dict[str, OrderedDict[int, None]] = {}  # by instance; least recently seen first
        self._turns: dict[str, int] = {}
        self._num_chosen = 0

    def choose(self, candidates: Sequence[Candidate], prompt: bytes, salt: bytes) -> int:
        """The index of the one that gets it.

        Args:
            candidates: at least one.
            prompt: its tokens, four bytes each.
            salt: prefixes are shared only under equal salts.
        """
        if len(candidates) == 1:
            return 0
        chunks = _chunk_hashes(prompt, salt)
        num_tokens = len(prompt) // 4

        def cost(index: int) -> tuple[int, int]:
            instance_id, load = candidates[index]
            tokens = _busy_tokens(load) + max(num_tokens - load.num_free_tokens, 0)
            tokens -= min(self._num_cached(instance_id, chunks), MAX_AFFINITY_TOKENS)
            return tokens, self._turns.get(instance_id, 0)

        chosen = min(range(len(candidates)), key=cost)
        self._note(candidates[chosen].instance_id, chunks)
        return chosen

    def least_loaded(self, candidates: Sequence[Candidate]) -> int:
        """The index of the one with the least to do; chooses nothing."""
        return min(range(len(candidates)), key=lambda index: _busy_tokens(candidates[index].load))

    def keep_only(self, instance_ids: set[str]) -> None:
        """Forgets all other engines."""
        for known in (self._prefixes, self._turns):
            for instance_id in known.keys() - instance_ids:
                del known[instance_id]

    def num_prefixes(self, instance_id: str) -> int:
        """How many are remembered of one engine."""
        return len(self._prefixes.get(instance_id, ()))

    def _num_cached(self, instance_id: str, chunks: Sequence[int]) -> int:
        known = self._prefixes.get(instance_id)
        if not known:
            return 0
        num_known = 0
        for chunk in chunks:
            if chunk not in known:
                break
            num_known += 1
        return num_known * CHUNK_TOKENS

    def _note(self, instance_id: str, chunks: Sequence[int]) -> None:
        self._num_chosen += 1
        self._turns[instance_id] = self._num_chosen
        known = self._prefixes.setdefault(instance_id, OrderedDict())
        for chunk in reversed(chunks):  # so that of a long prompt the end is forgotten before the beginning
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > self._max_prefixes:
            known.popitem(last=False)


def _busy_tokens(load: EngineLoad) -> int:
    return load.num_waiting_tokens + EXPECTED_OUTPUT_TOKENS * load.num_requests


def _chunk_hashes(prompt: bytes, salt: bytes) -> list[int]:
    """Of every whole chunk, with all that is before it."""
    hashes = []
    value = hash(salt)
    for start in range(0, min(len(prompt) - _CHUNK_BYTES + 1, MAX_CHUNKS * _CHUNK_BYTES), _CHUNK_BYTES):
        value = hash((value, prompt[start : start + _CHUNK_BYTES]))
        hashes.append(value)
    return hashes
