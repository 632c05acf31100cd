"""Load balancing: the least loaded engine gets a request; a cached prefix counts up to a limit."""

import random
import struct

from frontend.routing.cached_blocks import CachedBlocks
from frontend.routing.placement import (
    CHUNK_TOKENS,
    DECODE_TOKENS,
    EXPECTED_OUTPUT_TOKENS,
    MAX_AFFINITY_TOKENS,
    MAX_CHUNKS,
    MAX_RATED_CHUNKS,
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


def choose(placement, candidates, prompt, salt):
    return placement.choose(candidates, prompt, salt).candidate


IDLE = EngineLoad()
RATE = 1000.0


def num_prefixes(placement):
    sent = placement._sent.get("0")
    return len(sent.prefixes) if sent else 0


def test_single_engine_gets_all_requests_without_prefix_tracking():
    placement = Placement()
    assert choose(placement, candidates(EngineLoad(1000, 10**6, 0)), prompt((1, 640)), b"") == 0
    assert num_prefixes(placement) == 0


def test_prefixes_that_one_engine_got_while_the_other_restarted_are_known_afterwards():
    placement = Placement()
    choose(placement, candidates(IDLE, IDLE), prompt((9, 10)), b"")
    placement.keep_only({"0"})
    assert choose(placement, candidates(IDLE), prompt((1, 640)), b"") == 0
    assert choose(placement, candidates(EngineLoad(1), IDLE), prompt((1, 640), (2, 9)), b"") == 0


def test_least_loaded_gets_the_request():
    placement = Placement()
    assert choose(placement, candidates(EngineLoad(3), EngineLoad(2), EngineLoad(4)), prompt((1, 10)), b"") == 1
    waiting = candidates(EngineLoad(1, 0), EngineLoad(0, EXPECTED_OUTPUT_TOKENS + 1), EngineLoad(2, 0))
    assert choose(placement, waiting, prompt((1, 10)), b"") == 0
    full = candidates(EngineLoad(1, num_free_tokens=10_000), EngineLoad(0, num_free_tokens=100))
    assert choose(placement, full, prompt((1, 1000)), b"") == 0  # 900 tokens have no room in the other
    assert placement.least_loaded(waiting) == 0


def test_ties_are_broken_in_turn():
    placement = Placement()
    chosen = [choose(placement, candidates(IDLE, IDLE, IDLE), prompt((n, 10)), b"") for n in range(9)]
    assert chosen == [0, 1, 2] * 3


def test_known_prefix_wins_while_the_load_differs_by_less():
    for num_tokens in (CHUNK_TOKENS, 3 * CHUNK_TOKENS):
        for difference, expected in ((0, 0), (num_tokens - 1, 0), (num_tokens + 1, 1)):
            placement = Placement()
            assert choose(placement, candidates(IDLE, IDLE), prompt((7, num_tokens), (8, 50)), b"") == 0
            again = candidates(EngineLoad(0, difference), IDLE)
            assert choose(placement, again, prompt((7, num_tokens), (9, 50)), b"") == expected


def test_no_prefix_outweighs_more_than_its_cap():
    placement = Placement()
    long = prompt((7, 4 * MAX_AFFINITY_TOKENS))
    assert choose(placement, candidates(IDLE, IDLE), long, b"") == 0
    requests = MAX_AFFINITY_TOKENS // EXPECTED_OUTPUT_TOKENS
    assert choose(placement, candidates(EngineLoad(requests - 1), IDLE), long, b"") == 0
    assert choose(placement, candidates(EngineLoad(requests + 1), IDLE), long, b"") == 1


def test_prefix_must_match_from_the_beginning_with_the_same_salt():
    placement = Placement()
    assert choose(placement, candidates(IDLE, IDLE), prompt((7, CHUNK_TOKENS), (8, CHUNK_TOKENS)), b"a") == 0
    for other, salt in ((prompt((8, CHUNK_TOKENS)), b"a"), (prompt((7, CHUNK_TOKENS)), b"b")):
        fresh = Placement()
        choose(fresh, candidates(IDLE, IDLE), prompt((7, CHUNK_TOKENS), (8, CHUNK_TOKENS)), b"a")
        assert choose(fresh, candidates(EngineLoad(0, 1), IDLE), other, salt) == 1


def test_restarted_engine_has_no_prefixes():
    placement = Placement()
    choose(placement, candidates(IDLE, IDLE), prompt((7, 640)), b"")
    placement.keep_only({"1", "2"})
    assert num_prefixes(placement) == 0
    restarted = [Candidate("2", EngineLoad(0, 1)), Candidate("1", IDLE)]
    assert choose(placement, restarted, prompt((7, 640)), b"") == 1


def test_prefixes_are_bounded_and_the_oldest_are_evicted_first():
    placement = Placement(max_prefixes=10)
    for value in range(100):
        choose(placement, candidates(IDLE, EngineLoad(10**6)), prompt((value, 2 * CHUNK_TOKENS)), b"")
        assert num_prefixes(placement) <= 10
    busy = candidates(EngineLoad(0, CHUNK_TOKENS + 1), IDLE)
    assert choose(placement, busy, prompt((99, 2 * CHUNK_TOKENS)), b"") == 0
    assert choose(placement, busy, prompt((3, 2 * CHUNK_TOKENS)), b"") == 1
    endless = Placement()
    choose(endless, candidates(IDLE, EngineLoad(1)), prompt((1, (MAX_CHUNKS + 5) * CHUNK_TOKENS)), b"")
    assert num_prefixes(endless) == MAX_CHUNKS


def test_shared_prefix_does_not_send_every_request_to_one_engine():
    """All requests share a prefix and none ends: engines never differ by more than the cap allows."""
    rng = random.Random(1)
    placement, running = Placement(), [0, 0, 0]
    for _ in range(600):
        loads = candidates(*(EngineLoad(num) for num in running))
        running[choose(placement, loads, prompt((7, 2048), (rng.randrange(10**6), 64)), b"")] += 1
        assert max(running) - min(running) <= MAX_AFFINITY_TOKENS // EXPECTED_OUTPUT_TOKENS + 1


def rated(num_requests=0, num_waiting_tokens=0, num_free_tokens=1 << 60, rate=RATE):
    return EngineLoad(num_requests, num_waiting_tokens, num_free_tokens, rate)


def test_with_rates_a_prefix_counts_twice_and_in_full():
    """Own work counts once for the request and once for those behind it: a prefix outweighs twice its tokens."""
    num_tokens = 4 * MAX_AFFINITY_TOKENS
    for difference, expected in ((2 * num_tokens - 1, 0), (2 * num_tokens + 1, 1)):
        placement = Placement()
        assert choose(placement, candidates(rated(), rated()), prompt((7, num_tokens)), b"") == 0
        again = candidates(rated(0, difference), rated())
        assert choose(placement, again, prompt((7, num_tokens), (8, 50)), b"") == expected


def test_the_choice_says_how_many_tokens_are_cached():
    placement = Placement()
    two = candidates(rated(), rated())
    assert placement.choose(two, prompt((7, 640), (8, 10)), b"") == (0, 0)
    assert placement.choose(two, prompt((7, 640), (9, 10)), b"") == (0, 640)
    assert placement.choose(two[:1], prompt((7, 640)), b"") == (0, 640)


def test_a_faster_engine_may_have_more_waiting_tokens():
    fast, slow = rated(0, 3000, rate=4 * RATE), rated(0, 1000)
    assert choose(Placement(), candidates(slow, fast), prompt((1, 10)), b"") == 1
    same = rated(0, 3000)
    assert choose(Placement(), candidates(slow, same), prompt((1, 10)), b"") == 0


def test_an_engine_without_a_rate_counts_with_the_mean_of_the_others():
    loads = candidates(rated(0, 1000), EngineLoad(0, 999), rated(0, 1001))
    assert choose(Placement(), loads, prompt((1, 10)), b"") == 1
    loads = candidates(rated(0, 1000), EngineLoad(0, 1001), rated(0, 1001))
    assert choose(Placement(), loads, prompt((1, 10)), b"") == 0


def test_with_rates_requests_and_a_full_cache_count_too():
    loads = candidates(rated(2, 0), rated(0, 2 * DECODE_TOKENS - 1))
    assert choose(Placement(), loads, prompt((1, 10)), b"") == 1
    full = candidates(rated(num_free_tokens=100), rated(1))
    assert choose(Placement(), full, prompt((1, 1000)), b"") == 1


def test_with_rates_longer_prompts_are_remembered():
    placement = Placement()
    choose(placement, candidates(rated(), rated()), prompt((1, (MAX_RATED_CHUNKS + 5) * CHUNK_TOKENS)), b"")
    assert num_prefixes(placement) == MAX_RATED_CHUNKS


def test_with_rates_a_shared_prefix_spreads_once_the_work_that_waits_outweighs_it():
    """All requests share a prefix and none is computed: waiting work differs by at most twice a whole prompt."""
    rng = random.Random(1)
    placement, waiting = Placement(), [0, 0, 0]
    for _ in range(600):
        loads = candidates(*(rated(0, num_tokens) for num_tokens in waiting))
        choice = placement.choose(loads, prompt((7, 2048), (rng.randrange(10**6), 64)), b"")
        waiting[choice.candidate] += 2112 - choice.num_cached_tokens
        assert max(waiting) - min(waiting) <= 2 * 2112 + 64
    assert sum(waiting) < 600 * 64 + 4 * 2112, "each engine computed the prefix about once"


def reporting(*prompts, size=16):
    """The cache of an engine that reports these prompts."""
    blocks = CachedBlocks()
    blocks.is_followed = True
    for index, tokens in enumerate(prompts):
        parts = [tokens[start : start + 4 * size] for start in range(0, len(tokens) - 4 * size + 1, 4 * size)]
        names = [1000 * index + number for number in range(len(parts))]
        blocks.store(None, zip(names, parts, strict=True))
    return blocks


def test_what_an_engine_reports_counts_whoever_sent_it():
    tokens = prompt((7, 100))
    engines = [Candidate("0", rated()), Candidate("1", rated(), reporting(tokens))]
    assert Placement().choose(engines, tokens, b"") == (1, 96)
    engines = [Candidate("0", IDLE), Candidate("1", IDLE, reporting(tokens))]
    assert Placement().choose(engines, tokens, b"") == (1, 96)


def test_what_an_engine_no_longer_reports_does_not_count():
    tokens, placement = prompt((7, 640)), Placement()
    blocks = reporting()
    assert placement.choose([Candidate("0", rated(), blocks), Candidate("1", rated())], tokens, b"") == (0, 0)
    sent = [Candidate("0", rated(1), blocks), Candidate("1", rated(1))]  # not computed yet: it will be there
    assert placement.choose(sent, tokens, b"") == (0, 640)
    ended = [Candidate("0", rated(), blocks), Candidate("1", rated())]
    assert placement.choose(ended, tokens, b"") == (1, 0)  # computed and evicted
    blocks.is_followed = False  # the events were interrupted
    assert placement.choose([Candidate("0", rated(), blocks), Candidate("1", rated(1))], tokens, b"") == (0, 640)


def test_of_prompts_that_were_sent_the_last_ones_may_not_be_computed():
    placement, blocks = Placement(), reporting()
    first, second = prompt((7, 640)), prompt((8, 640))
    for tokens in (first, second):
        assert choose(placement, [Candidate("0", IDLE, blocks), Candidate("1", EngineLoad(9))], tokens, b"") == 0
    one_open = [Candidate("0", EngineLoad(1), blocks), Candidate("1", EngineLoad(9))]
    assert placement.choose(one_open, second, b"") == (0, 640)
    assert placement.choose(one_open, first, b"") == (0, 0)
