"""Which tokens may follow, against plain Python over sets."""

import random

import numpy as np
import pytest

from engine.constraints.bad_sequences import BadSequences
from engine.constraints.constraint import Constraint, HeldBackEnds
from engine.constraints.token_bits import all_words, num_words, remove, words_of


def ids_of(words):
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def drawable(constraint, vocab_size):
    words = np.full(num_words(vocab_size), 0x55AA55AA, dtype=np.int32)
    constraint.fill(words)
    return ids_of(words)


class ScriptedMatcher:
    """Allows the tokens that the test sets."""

    def __init__(self, *steps):
        self.error = ""
        self._steps = steps
        self.accepted = []

    def accept(self, token_ids):
        self.accepted += token_ids

    def fill(self, words):
        words[:] = words_of(self._steps[len(self.accepted)], 32 * len(words))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 3072])
def test_sets_of_tokens_survive_as_bits(vocab_size):
    rng = random.Random(vocab_size)
    chosen = {rng.randrange(vocab_size) for _ in range(20)}
    assert ids_of(words_of(chosen, vocab_size)) == chosen
    assert ids_of(words_of((), vocab_size)) == set()
    everything = all_words(vocab_size)
    assert everything.dtype == np.int32
    assert ids_of(everything) == set(range(vocab_size))
    remove(everything, chosen)
    assert ids_of(everything) == set(range(vocab_size)) - chosen


def test_nothing_drawn_ever_completes_a_bad_sequence():
    """Random sequences over a small alphabet, so that they overlap, repeat and contain each other."""
    for seed in range(300):
        rng = random.Random(seed)
        size = rng.choice((2, 3, 5))
        bad = [[rng.randrange(size) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 6))]
        allowed = [i for i in range(size) if rng.random() < 0.8] or [0]
        constraint = Constraint(size, allowed_ids=allowed, bad_sequences=bad)
        output = []
        for _ in range(30):
            wanted = {i for i in allowed if not any([*output, i][-len(sequence) :] == sequence for sequence in bad)}
            assert drawable(constraint, size) == wanted, f"seed {seed}: after {output}, bad are {bad}"
            if not wanted:
                break
            token_id = rng.choice(sorted(wanted))
            output.append(token_id)
            constraint.accept([token_id])
            assert constraint.num_accepted == len(output)


def test_bad_sequences_are_found_in_replayed_and_in_new_output():
    rng = random.Random(3)
    for _ in range(100):
        bad = [[rng.randrange(3) for _ in range(rng.randint(2, 5))] for _ in range(4)]
        output = [rng.randrange(3) for _ in range(rng.randrange(40))]
        at_once, one_by_one = BadSequences(bad), BadSequences(bad)
        at_once.accept(output)
        for token_id in output:
            one_by_one.accept([token_id])
        assert at_once.forbidden_ids() == one_by_one.forbidden_ids()


def test_only_what_depends_on_the_answer_is_dynamic():
    assert not Constraint(9, allowed_ids=[1]).is_dynamic
    assert not Constraint(9, bad_sequences=[[1], [2]]).is_dynamic
    assert Constraint(9, bad_sequences=[[1], [2, 3]]).is_dynamic
    assert Constraint(9, matcher=ScriptedMatcher()).is_dynamic


def test_other_constraints_restrict_a_grammar():
    matcher = ScriptedMatcher({1, 2, 3, 4, 5}, {1, 2, 3, 4, 5})
    constraint = Constraint(64, allowed_ids=[1, 2, 3, 60], bad_sequences=[[1], [2, 3]], matcher=matcher)
    assert drawable(constraint, 64) == {2, 3}
    constraint.accept([2])
    assert drawable(constraint, 64) == {2}
    assert matcher.accepted == [2]


def test_ends_are_held_back_as_long_as_anything_else_can_be_drawn():
    ends = HeldBackEnds(token_ids=(0, 7), min_tokens=2)
    matcher = ScriptedMatcher({0, 7, 9}, {0, 7}, {0, 7, 9})
    constraint = Constraint(32, matcher=matcher, ends=ends)
    assert drawable(constraint, 32) == {9}
    constraint.accept([9])
    assert drawable(constraint, 32) == {0, 7}, "nothing but ends is left"
    constraint.accept([7])
    assert drawable(constraint, 32) == {0, 7, 9}, "min_tokens are there"


def test_ignored_ends_are_held_back_for_ever_and_stop_tokens_are_not():
    ends = HeldBackEnds(token_ids=(0, 7), min_tokens=1, always=(0,))
    constraint = Constraint(32, matcher=ScriptedMatcher({0, 7, 9}, {0, 7, 9}, {0}), ends=ends)
    assert drawable(constraint, 32) == {9}
    constraint.accept([9])
    assert drawable(constraint, 32) == {7, 9}
    constraint.accept([9])
    assert drawable(constraint, 32) == {0}


def test_after_an_error_nothing_can_be_drawn():
    matcher = ScriptedMatcher({1}, {1})
    constraint = Constraint(32, matcher=matcher)
    assert constraint.error == ""
    matcher.error = "too complex"
    assert drawable(constraint, 32) == set()
    assert constraint.error == "too complex"
    failed = Constraint(32, allowed_ids=[1])
    failed.fail("first")
    failed.fail("second")
    assert (failed.error, drawable(failed, 32)) == ("first", set())
