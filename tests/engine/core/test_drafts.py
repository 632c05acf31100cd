"""Drafts against a search that is obviously right, and what the limits of a request learn from results."""

import random
import time
from collections.abc import Callable, Sequence

import pytest

from engine.core.drafts import DraftLimits, PromptLookup, confirmed
from engine.core.request import Request


def expected_draft(tokens: Sequence[int], limits: DraftLimits) -> list[int]:
    """The longest suffix first; of its earlier occurrences the last one; its text goes on to repeat itself."""
    for size in range(limits.prompt_lookup_max, limits.prompt_lookup_min - 1, -1):
        if len(tokens) < size:
            continue
        for start in range(len(tokens) - size - 1, -1, -1):
            if list(tokens[start : start + size]) == list(tokens[-size:]):
                text = list(tokens)
                for _ in range(limits.num_speculative_tokens):
                    text.append(text[start + size + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("token_ids", [(0, 1), (0, 1, 256, 65536, 1 << 24), (1, 2, 3, 257), tuple(range(40))])
def test_drafts_are_those_of_a_plain_search(make_request: Callable[..., Request], token_ids: tuple[int, ...]) -> None:
    """The token ids look alike at other offsets of their bytes. Tokens arrive a few at a time."""
    rng = random.Random(len(token_ids))
    num_found = 0
    for _ in range(120):
        shortest = rng.randint(1, 3)
        limits = DraftLimits(rng.randint(1, 9), shortest + rng.randrange(3), shortest)
        request = make_request(0, rng.choices(token_ids, k=rng.randint(1, 30)))
        lookup = PromptLookup(limits)
        for _ in range(12):
            draft = lookup.propose(request, 100)
            assert list(draft) == expected_draft([*request.prompt_ids, *request.output_ids], limits)
            num_found += bool(draft)
            request.output_ids += rng.choices(token_ids, k=rng.randrange(4))
    assert num_found > 200


def test_matches_between_tokens_are_passed_a_bounded_number_of_times(make_request: Callable[..., Request]) -> None:
    for num_between, draft in ((100, (5,)), (1000, ())):
        request = make_request(0, [8192, 5, *[32] * num_between, 8192])  # 20 00 00 00 contains 00 20 00 00 of 8192
        assert PromptLookup(DraftLimits(1, 1, 1)).propose(request, 8) == draft


def test_drafts_adapt_to_what_is_accepted(make_request: Callable[..., Request]) -> None:
    request = make_request(0, [1, 2, 3] * 10)
    lookup = PromptLookup(DraftLimits(8, 3, 2))
    lengths = []
    for num_accepted in (8, 3, 3, 6, 0):
        draft = lookup.propose(request, 100)
        lengths.append(len(draft))
        lookup.learn(len(draft), num_accepted, request.num_tokens)
    assert lengths == [8, 8, 3, 6, 8]
    assert lookup.propose(request, 100) == ()  # for one token
    request.output_ids.append(1)
    assert lookup.propose(request, 100) == (2,)
    lookup.learn(1, 0, request.num_tokens)
    request.output_ids += [2, 3]
    assert lookup.propose(request, 100) == ()  # for three tokens
    request.output_ids.append(1)
    assert lookup.propose(request, 100) == (2,)


def test_a_limit_of_the_step_cuts_a_draft(make_request: Callable[..., Request]) -> None:
    request = make_request(0, [1, 2, 3] * 10)
    lookup = PromptLookup(DraftLimits(8, 3, 2))
    assert lookup.propose(request, 2) == (1, 2)
    assert lookup.propose(request, 0) == lookup.propose(request, -1) == ()


@pytest.mark.parametrize(
    ("draft", "drawn", "tokens"),
    [
        ((5, 6, 7), (5, 6, 7, 8), (5, 6, 7, 8)),
        ((5, 6, 7), (5, 9, 7, 8), (5, 9)),
        ((5, 6, 7), (4, 6, 7, 8), (4,)),
        ((5, 6, 7), (5, -1, 7, 8), (5,)),
        ((5, 6, 7), (-1, 6, 7, 8), ()),
    ],
)
def test_draws_count_up_to_the_first_that_is_not_the_draft(
    draft: tuple[int, ...], drawn: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    assert confirmed(draft, drawn) == tokens


def test_a_lookup_in_a_long_text_is_cheap(make_request: Callable[..., Request]) -> None:
    rng = random.Random(0)
    request = make_request(0, [rng.randrange(5000) for _ in range(100_000)] + [5000, 5001])
    lookup = PromptLookup(DraftLimits(8, 4, 2))
    assert lookup.propose(request, 8) == ()  # packs the prompt
    started_s = time.process_time()
    for _ in range(20):
        assert lookup.propose(request, 8) == ()
    assert time.process_time() - started_s < 0.2  # 3 ms, on a quiet machine
