"""CachedBlocks against a model that keeps whole prefixes, over random events."""

import random
import struct

import pytest

from frontend.routing.cached_blocks import MAX_BLOCKS, CachedBlocks

SIZE = 4


def packed(token_ids):
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def name_of(prefix):
    """A block's name: a number for all tokens up to its end."""
    return hash(tuple(prefix))


def blocks_of(prompt, start=0):
    """Name and tokens of the full blocks from a position on."""
    return [
        (name_of(prompt[: end + SIZE]), packed(prompt[end : end + SIZE]))
        for end in range(start, len(prompt) - SIZE + 1, SIZE)
    ]


def store(blocks, prompt, start=0):
    blocks.store(name_of(prompt[:start]) if start else None, blocks_of(prompt, start))


@pytest.mark.parametrize("seed", range(20))
def test_prefixes_are_those_of_the_blocks_that_are_there(seed):
    rng = random.Random(seed)
    blocks, held = CachedBlocks(), set()  # of prefixes

    def prompt():
        return tuple(rng.randrange(2) for _ in range(rng.randrange(5 * SIZE)))

    for _ in range(400):
        tokens = prompt()
        match rng.randrange(8):
            case 0 | 1 | 2:
                start = SIZE * rng.randrange(len(tokens) // SIZE + 1)
                store(blocks, tokens, start)
                held |= {tokens[:end] for end in range(start + SIZE, len(tokens) + 1, SIZE)}
            case 3 | 4 | 5 if held:
                gone = rng.sample(sorted(held), min(len(held), rng.randrange(1, 4)))
                blocks.remove([*map(name_of, gone), 12345])
                held -= set(gone)
            case 6 if rng.random() < 0.1:
                blocks.clear()
                held.clear()
        assert len(blocks) == len(held)
        tokens, num_cached = prompt(), 0
        while tokens[: num_cached + SIZE] in held and num_cached + SIZE <= len(tokens):
            num_cached += SIZE
        assert blocks.num_cached_tokens(packed(tokens)) == num_cached


def test_number_of_blocks_is_bounded_and_the_oldest_are_forgotten():
    blocks = CachedBlocks(max_blocks=6)
    for value in range(5):
        store(blocks, (value,) * 2 * SIZE)
    assert len(blocks) == 6
    cached = [blocks.num_cached_tokens(packed((value,) * 2 * SIZE)) for value in range(5)]
    assert cached == [0, 0, 2 * SIZE, 2 * SIZE, 2 * SIZE]
    assert MAX_BLOCKS > 100_000


def test_the_same_content_under_another_name_is_one_block():
    blocks = CachedBlocks()
    blocks.store(None, [(1, packed((7,) * SIZE))])
    blocks.store(None, [(2, packed((7,) * SIZE))])
    assert len(blocks) == 1
    blocks.remove([1])  # the copy that was replaced
    assert blocks.num_cached_tokens(packed((7,) * SIZE)) == SIZE
    blocks.remove([2])
    assert blocks.num_cached_tokens(packed((7,) * SIZE)) == len(blocks) == 0


def test_blocks_of_another_size_are_ignored():
    blocks = CachedBlocks()
    blocks.store(None, [(0, packed((9,) * 100_000))])  # too large to be one
    blocks.store(None, [(1, b""), (2, packed((7,) * SIZE)), (3, packed((7,) * 2 * SIZE))])
    assert len(blocks) == 1
    blocks.store(None, [(2, packed((7,) * SIZE))])
    assert blocks.num_cached_tokens(packed((7,) * 3 * SIZE)) == SIZE
