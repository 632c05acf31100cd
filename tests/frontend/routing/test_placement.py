"""Load balancing: the least loaded engine gets a request; a cached prefix counts up to a limit."""

import random
import struct

from frontend.routing.placement import (
    CHUNK_TOKENS,
    EXPECTED_OUTPUT_TOKENS,
    MAX_AFFINITY_TOKENS,
    MAX_CHUNKS,
    Candidate,
    EngineLoad,
    Placement,
)


def prompt(*parts):
    """Returns encoded token ids from parts of (token id, number of tokens)."""
    ids = [value for value, num_tokens in parts for _ in range(num_tokens)]
    return struct.pack(f"<{len(ids)}I", *ids)


def candidates(*loads):
    return [Candidate(str(index), load) for index, load in enumerate(loads)]


IDLE = EngineLoad()


def num_prefixes(placement):
    return len(placement._prefixes.get("0", ()))


def test_single_engine_gets_all_requests_without_prefix_tracking():
    placement = Placement()
    assert placement.choose(candidates(EngineLoad(1000, 10**6, 0)), prompt((1, 640)), b"") == 0
    assert num_prefixes(placement) == 0


def test_least_loaded_gets_the_request():
    placement = Placement()
    assert placement.choose(candidates(EngineLoad(3), EngineLoad(2), EngineLoad(4)), prompt((1, 10)), b"") == 1
    waiting = candidates(EngineLoad(1, 0), EngineLoad(0, EXPECTED_OUTPUT_TOKENS + 1), EngineLoad(2, 0))
    assert placement.choose(waiting, prompt((1, 10)), b"") == 0
    full = candidates(EngineLoad(1, num_free_tokens=10_000), EngineLoad(0, num_free_tokens=100))
    assert placement.choose(full, prompt((1, 1000)), b"") == 0  # 900 tokens have no room in the other
    assert placement.least_loaded(waiting) == 0


def test_ties_are_broken_in_turn():
    placement = Placement()
    chosen = [placement.choose(candidates(IDLE, IDLE, IDLE), prompt((n, 10)), b"") for n in range(9)]
    assert chosen == [0, 1, 2] * 3


def test_known_prefix_wins_while_the_load_differs_by_less():
    for num_tokens in (CHUNK_TOKENS, 3 * CHUNK_TOKENS):
        for difference, expected in ((0, 0), (num_tokens - 1, 0), (num_tokens + 1, 1)):
            placement = Placement()
            assert placement.choose(candidates(IDLE, IDLE), prompt((7, num_tokens), (8, 50)), b"") == 0
            again = candidates(EngineLoad(0, difference), IDLE)
            assert placement.choose(again, prompt((7, num_tokens), (9, 50)), b"") == expected


def test_no_prefix_outweighs_more_than_its_cap():
    placement = Placement()
    long = prompt((7, 4 * MAX_AFFINITY_TOKENS))
    assert placement.choose(candidates(IDLE, IDLE), long, b"") == 0
    requests = MAX_AFFINITY_TOKENS // EXPECTED_OUTPUT_TOKENS
    assert placement.choose(candidates(EngineLoad(requests - 1), IDLE), long, b"") == 0
    assert placement.choose(candidates(EngineLoad(requests + 1), IDLE), long, b"") == 1


def test_prefix_must_match_from_the_beginning_with_the_same_salt():
    placement = Placement()
    assert placement.choose(candidates(IDLE, IDLE), prompt((7, CHUNK_TOKENS), (8, CHUNK_TOKENS)), b"a") == 0
    for other, salt in ((prompt((8, CHUNK_TOKENS)), b"a"), (prompt((7, CHUNK_TOKENS)), b"b")):
        fresh = Placement()
        fresh.choose(candidates(IDLE, IDLE), prompt((7, CHUNK_TOKENS), (8, CHUNK_TOKENS)), b"a")
        assert fresh.choose(candidates(EngineLoad(0, 1), IDLE), other, salt) == 1


def test_restarted_engine_has_no_prefixes():
    placement = Placement()
    placement.choose(candidates(IDLE, IDLE), prompt((7, 640)), b"")
    placement.keep_only({"1", "2"})
    assert num_prefixes(placement) == 0
    restarted = [Candidate("2", EngineLoad(0, 1)), Candidate("1", IDLE)]
    assert placement.choose(restarted, prompt((7, 640)), b"") == 1


def test_prefixes_are_bounded_and_the_oldest_are_evicted_first():
    placement = Placement(max_prefixes=10)
    for value in range(100):
        placement.choose(candidates(IDLE, EngineLoad(10**6)), prompt((value, 2 * CHUNK_TOKENS)), b"")
        assert num_prefixes(placement) <= 10
    busy = candidates(EngineLoad(0, CHUNK_TOKENS + 1), IDLE)
    assert placement.choose(busy, prompt((99, 2 * CHUNK_TOKENS)), b"") == 0
    assert placement.choose(busy, prompt((3, 2 * CHUNK_TOKENS)), b"") == 1
    endless = Placement()
    endless.choose(candidates(IDLE, EngineLoad(1)), prompt((1, (MAX_CHUNKS + 5) * CHUNK_TOKENS)), b"")
    assert num_prefixes(endless) == MAX_CHUNKS


def test_shared_prefix_does_not_send_every_request_to_one_engine():
    """All requests share a prefix and none ends: engines never differ by more than the cap allows."""
    rng = random.Random(1)
    placement, running = Placement(), [0, 0, 0]
    for _ in range(600):
        loads = candidates(*(EngineLoad(num) for num in running))
        running[placement.choose(loads, prompt((7, 2048), (rng.randrange(10**6), 64)), b"")] += 1
        assert max(running) - min(running) <= MAX_AFFINITY_TOKENS // EXPECTED_OUTPUT_TOKENS + 1
