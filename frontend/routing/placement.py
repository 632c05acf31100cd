"""Load balancing: a request goes to the least loaded engine, unless a slightly busier one has its prefix cached. Pure.

The cost of an engine is a sum in tokens: waiting prompt tokens, EXPECTED_OUTPUT_TOKENS for every request, and the
tokens that exceed its KV cache, minus the prompt's tokens in a prefix that was sent to it before. This discount is
limited to MAX_AFFINITY_TOKENS, so that a common prefix does not send all requests to one engine: MAX_AFFINITY_TOKENS /
EXPECTED_OUTPUT_TOKENS more requests than elsewhere outweigh any prefix. Ties go to the engine chosen longest ago.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from chairlift.service.engine_protocol import BYTES_PER_TOKEN_ID, EXPECTED_OUTPUT_TOKENS

MAX_AFFINITY_TOKENS = 2048
CHUNK_TOKENS = 64
"""Granularity of prefixes; a multiple of the engine's block size of 16."""

MAX_CHUNKS = 256
"""Maximum chunks considered of one prompt."""

MAX_PREFIXES = 1 << 14
"""Maximum chunks remembered for each engine (a million tokens), least recently used evicted first."""

_CHUNK_BYTES = CHUNK_TOKENS * BYTES_PER_TOKEN_ID


class EngineLoad(NamedTuple):
    """One engine's current load.

    Attributes:
        num_requests: requests in the engine.
        num_waiting_tokens: prompt tokens that are not computed yet.
        num_free_tokens: free capacity of its KV cache.
    """

    num_requests: int = 0
    num_waiting_tokens: int = 0
    num_free_tokens: int = 1 << 60


class Candidate(NamedTuple):
    """An engine that could take the request.

    Attributes:
        instance_id: changes when the engine restarts, which empties its cache.
    """

    instance_id: str
    load: EngineLoad


class Placement:
    """Chooses engines, and remembers the prefixes that each one got.

    Invariant: at most `max_prefixes` prefixes are remembered for each engine, and none for removed engines.
    """

    def __init__(self, *, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: dict[str, OrderedDict[int, None]] = {}  # by instance; least recently seen first
        self._turns: dict[str, int] = {}
        self._num_chosen = 0

    def choose(self, candidates: Sequence[Candidate], prompt: bytes, salt: Hashable) -> int:
        """Returns the index of the engine that gets a request.

        Args:
            candidates: at least one.
            prompt: the token ids, four bytes each.
            salt: only requests with equal salts share prefixes.
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
        """Returns the index of the least loaded engine; does not count as a choice."""
        return min(range(len(candidates)), key=lambda index: _busy_tokens(candidates[index].load))

    def keep_only(self, instance_ids: set[str]) -> None:
        """Forgets engines that are not among these."""
        for known in (self._prefixes, self._turns):
            for instance_id in known.keys() - instance_ids:
                del known[instance_id]

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
        for chunk in reversed(chunks):  # so that the end of a long prompt is evicted before its beginning
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > self._max_prefixes:
            known.popitem(last=False)


def _busy_tokens(load: EngineLoad) -> int:
    return load.num_waiting_tokens + EXPECTED_OUTPUT_TOKENS * load.num_requests


def _chunk_hashes(prompt: bytes, salt: Hashable) -> list[int]:
    """Returns a hash for each full chunk and everything before it."""
    hashes = []
    value = hash(salt)
    for start in range(0, min(len(prompt) - _CHUNK_BYTES + 1, MAX_CHUNKS * _CHUNK_BYTES), _CHUNK_BYTES):
        value = hash((value, prompt[start : start + _CHUNK_BYTES]))
        hashes.append(value)
    return hashes
