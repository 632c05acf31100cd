"""Load balancing: a request goes where its first token comes soonest, or to the least loaded engine. Pure.

**With rates**, if an engine has reported how many prompt tokens it computes per second, the cost of an engine is in
seconds: the prompt tokens that wait there, plus twice those that the request itself adds, over the rate. What it adds
is its prompt without the prefix that the engine has cached, and the tokens that exceed its KV cache. They count twice:
once until its own first token, and once for the requests that come next and wait for them. Work therefore follows
cached prefixes as far as they save work, and no further. Every request in the engine counts as DECODE_TOKENS. A rate
must be that of the device, such as the inverse of the step-time model's time per token: measured rates follow the
lengths of the last prompts, and that noise costs more than placement gains (80 to 87 instead of 96 % of requests in
time). An engine without a rate counts with the mean of the others.

**Without any rate**, the cost is in tokens: waiting prompt tokens, EXPECTED_OUTPUT_TOKENS for every request, and the
tokens that exceed its KV cache, minus the prompt's tokens in a prefix that it has cached. This discount is
limited to MAX_AFFINITY_TOKENS, so that a common prefix does not send all requests to one engine: MAX_AFFINITY_TOKENS /
EXPECTED_OUTPUT_TOKENS more requests than elsewhere outweigh any prefix.

What an engine has cached is what it reports, if it does (`CachedBlocks`), and prompts sent there that it may not have
computed yet; of an engine that reports nothing, all prefixes that were sent there.

Ties go to the engine chosen longest ago.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.service.engine_protocol import BYTES_PER_TOKEN_ID, EXPECTED_OUTPUT_TOKENS
from frontend.routing.cached_blocks import CachedBlocks

MAX_AFFINITY_TOKENS = 2048
DECODE_TOKENS = 64
"""Prompt tokens that one request costs those that wait behind it, where rates are known. 8 to 256 make no difference
while prompts are the load; where answers are, it spreads them.
"""

CHUNK_TOKENS = 64
"""Granularity of prefixes; a multiple of the engine's block size of 16."""

MAX_CHUNKS = 256
"""Maximum chunks considered of one prompt without rates, where no more than MAX_AFFINITY_TOKENS count."""

MAX_RATED_CHUNKS = 2048
"""The same with rates: 131,072 tokens, 0.6 ms of hashing. Of the Mooncake conversation trace (mean prompt 12k tokens),
at 20 requests/s on 16 engines, 92.6 % are in time with 256 chunks, 95.5 % with 2,048.
"""

MAX_PREFIXES = 1 << 14
"""Maximum chunks remembered for each engine (a million tokens), least recently used evicted first."""

_CHUNK_BYTES = CHUNK_TOKENS * BYTES_PER_TOKEN_ID


class EngineLoad(NamedTuple):
    """One engine's current load.

    Attributes:
        num_requests: requests in the engine.
        num_waiting_tokens: prompt tokens that are not computed yet.
        num_free_tokens: free capacity of its KV cache.
        prompt_tokens_per_s: prompt tokens that its device computes per second in full steps; 0: not known.
    """

    num_requests: int = 0
    num_waiting_tokens: int = 0
    num_free_tokens: int = 1 << 60
    prompt_tokens_per_s: float = 0.0


class Candidate(NamedTuple):
    """An engine that could take the request.

    Attributes:
        instance_id: changes when the engine restarts, which empties its cache.
        blocks: its prefix cache as it reports it; None: it does not, or they do not apply to the request.
    """

    instance_id: str
    load: EngineLoad
    blocks: CachedBlocks | None = None


class Choice(NamedTuple):
    """The engine that gets a request.

    Attributes:
        candidate: its index.
        num_cached_tokens: tokens of the prompt's longest prefix that is probably cached there.
    """

    candidate: int
    num_cached_tokens: int


@dataclass(slots=True)
class _Sent:
    """What was sent to one engine.

    Attributes:
        prefixes: chunks, each with the number of the last request that had it; least recently sent first.
        num_requests: requests so far.
        turn: when it was chosen last.
    """

    prefixes: OrderedDict[int, int] = field(default_factory=OrderedDict)
    num_requests: int = 0
    turn: int = 0


class Placement:
    """Chooses engines, and remembers the prefixes that each one got.

    Invariant: at most `max_prefixes` prefixes are remembered for each engine, and none for removed engines.
    """

    def __init__(self, *, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._sent: dict[str, _Sent] = {}  # by instance
        self._num_chosen = 0

    def choose(self, candidates: Sequence[Candidate], prompt: bytes, salt: Hashable) -> Choice:
        """Returns the engine that gets a request.

        Args:
            candidates: at least one. One that never had others gets the request without a look at its prompt.
            prompt: the token ids, four bytes each.
            salt: only requests with equal salts share prefixes.
        """
        if len(candidates) == 1 and not self._sent:
            return Choice(0, 0)
        rates = [candidate.load.prompt_tokens_per_s for candidate in candidates if candidate.load.prompt_tokens_per_s]
        chunks = _chunk_hashes(prompt, salt, MAX_RATED_CHUNKS if rates else MAX_CHUNKS)
        num_tokens = len(prompt) // BYTES_PER_TOKEN_ID
        all_sent = [self._sent.get(candidate.instance_id) for candidate in candidates]
        cached = [_num_cached(*both, prompt, chunks) for both in zip(candidates, all_sent, strict=True)]
        mean_rate = sum(rates) / len(rates) if rates else 0.0

        def cost(index: int) -> tuple[float, int]:
            load, sent = candidates[index].load, all_sent[index]
            num_excess = max(num_tokens - load.num_free_tokens, 0)
            turn = sent.turn if sent is not None else 0
            if not rates:
                return _busy_tokens(load) + num_excess - min(cached[index], MAX_AFFINITY_TOKENS), turn
            num_ahead = load.num_waiting_tokens + DECODE_TOKENS * load.num_requests
            num_new = num_tokens - cached[index] + num_excess
            return (num_ahead + 2 * num_new) / (load.prompt_tokens_per_s or mean_rate), turn

        chosen = min(range(len(candidates)), key=cost)
        self._note(candidates[chosen].instance_id, chunks)
        return Choice(chosen, cached[chosen])

    def least_loaded(self, candidates: Sequence[Candidate]) -> int:
        """Returns the index of the least loaded engine; does not count as a choice."""
        return min(range(len(candidates)), key=lambda index: _busy_tokens(candidates[index].load))

    def keep_only(self, instance_ids: set[str]) -> None:
        """Forgets engines that are not among these."""
        for instance_id in self._sent.keys() - instance_ids:
            del self._sent[instance_id]

    def _note(self, instance_id: str, chunks: Sequence[int]) -> None:
        self._num_chosen += 1
        sent = self._sent.setdefault(instance_id, _Sent())
        sent.turn = self._num_chosen
        sent.num_requests += 1
        prefixes = sent.prefixes
        for chunk in reversed(chunks):  # so that the end of a long prompt is evicted before its beginning
            prefixes[chunk] = sent.num_requests
            prefixes.move_to_end(chunk)
        while len(prefixes) > self._max_prefixes:
            prefixes.popitem(last=False)


def _num_cached(candidate: Candidate, sent: _Sent | None, prompt: bytes, chunks: Sequence[int]) -> int:
    blocks, prefixes = candidate.blocks, sent.prefixes if sent is not None else {}
    num_reported = oldest = 0
    if blocks is not None and blocks.is_followed:
        num_reported = blocks.num_cached_tokens(prompt[: MAX_RATED_CHUNKS * _CHUNK_BYTES])
        # It has computed, and then reports, all but the last requests: as many as it has open.
        oldest = sent.num_requests - candidate.load.num_requests + 1 if sent is not None else 0
    num_known = 0
    for chunk in chunks:
        if prefixes.get(chunk, -1) < oldest:
            break
        num_known += 1
    return max(num_reported, num_known * CHUNK_TOKENS)


def _busy_tokens(load: EngineLoad) -> int:
    return load.num_waiting_tokens + EXPECTED_OUTPUT_TOKENS * load.num_requests


def _chunk_hashes(prompt: bytes, salt: Hashable, max_chunks: int) -> list[int]:
    """Returns a hash for each full chunk and everything before it, of the first `max_chunks`."""
    hashes = []
    value = hash(salt)
    for start in range(0, min(len(prompt) - _CHUNK_BYTES + 1, max_chunks * _CHUNK_BYTES), _CHUNK_BYTES):
        value = hash((value, prompt[start : start + _CHUNK_BYTES]))
        hashes.append(value)
    return hashes
