"""Constrained rows on a real model, in mixed batches, after preemption and with several steps in flight."""

import json
import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer

from chairlift.service.end_reason import EndReason
from engine.constraints.constraint import Constraint, HeldBackEnds
from engine.constraints.grammar import GrammarMatcher, GrammarTokenizer
from engine.constraints.token_bits import all_words
from engine.core.request import SamplingParams
from engine.demo import MODEL_DIR
from kernels.families import cpu_ops
from tests.support.engine.stream import LateStream

SMALL, LARGE = 211, 3072  # vocabularies; the larger one is the demo model's
END_ID = 1
DRAWN = SamplingParams(seed=5, max_tokens=24, ignore_end_token=True)
TEXT = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
PERSON = r'\{"name":"[a-z]{1,8}","age":[1-9][0-9]{0,2}\}'


@pytest.fixture(scope="module")
def engine(make_checkpoint, engine_on):
    return engine_on(make_checkpoint("llama", vocab_size=LARGE, eos_token_id=END_ID), cpu_ops())


@pytest.fixture(scope="module")
def person():
    """person(): a constraint to one object with two fields, of an answer that has not begun."""
    tokenizer = GrammarTokenizer((MODEL_DIR / "tokenizer.json").read_bytes(), LARGE, {END_ID})
    compiled = GrammarMatcher.compile(f"start: /{PERSON}/", tokenizer)
    return lambda **options: Constraint(LARGE, matcher=compiled.copy(), **options)


@pytest.fixture
def crowd(prompt, person):
    """Eight people at random, and eight answers that may be anything between them."""
    rng = random.Random(4)
    free, bound = [], []
    for index in range(8):
        params = SamplingParams(seed=index, max_tokens=60)
        prompt_ids = [rng.randrange(LARGE) for _ in range(rng.randint(1, 40))]
        free.append(prompt(prompt_ids, replace(params, top_logprobs=2)))
        bound.append(prompt(prompt_ids[::-1], params, constraint=person))
    return free, bound


def ids(run):
    return [tuple(answer.token_ids) for answer in run.answers]


def test_allowed_tokens_are_drawn_as_if_all_others_had_no_probability(tiny_engine, prompt):
    """Truth: a bias of -100 on every other token, which no random number makes up for."""
    engine = tiny_engine("llama")
    for allowed in ((7,), (3, 4, 5), tuple(range(0, SMALL, 3)), (SMALL - 1, 0)):
        biases = tuple((i, -100.0) for i in range(SMALL) if i not in allowed)
        for temperature in (0.0, 1.0):
            params = replace(DRAWN, temperature=temperature)
            run = engine.serve(
                [
                    prompt([1, 2, 3], params, constraint=partial(Constraint, SMALL, allowed_ids=allowed)),
                    prompt([1, 2, 3], replace(params, logit_bias=biases)),
                    prompt([1, 2, 3], params),
                ]
            )
            masked, biased, free = ids(run)
            assert masked == biased
            assert set(masked) <= set(allowed)
            assert len(masked) == 24
            assert free == ids(engine.serve([prompt([1, 2, 3], params)]))[0]


def test_bad_sequences_are_avoided_as_if_their_last_token_were_hopeless_just_then(tiny_engine, prompt):
    """Truth: the answer token by token, each by a request of its own with biases that plain Python found."""
    engine = tiny_engine("llama")
    params = replace(DRAWN, temperature=1.0, max_tokens=16)
    output = list(ids(engine.serve([prompt([9, 8], params)]))[0])
    bad = [tuple(output[:1]), tuple(output[2:5]), tuple(output[7:9]), (output[4], output[5], 3)]
    constrained = ids(engine.serve([prompt([9, 8], params, constraint=partial(Constraint, SMALL, bad_sequences=bad))]))[
        0
    ]
    expected = ()
    while len(expected) < 16:
        forbidden = {seq[-1] for seq in bad if expected[len(expected) - len(seq) + 1 :] == seq[:-1] or len(seq) == 1}
        step = replace(params, max_tokens=len(expected) + 1, logit_bias=tuple((i, -100.0) for i in forbidden))
        expected = ids(engine.serve([prompt([9, 8], step, expected)]))[0]
    assert constrained == expected
    assert constrained != tuple(output)


def test_every_answer_under_a_grammar_keeps_to_it_and_its_neighbours_never_notice(engine, crowd):
    free, bound = crowd
    mixed = engine.serve([item for pair in zip(free, bound, strict=True) for item in pair])
    for answer in mixed.answers[1::2]:
        assert answer.completion.reason is EndReason.END_TOKEN
        person = json.loads(TEXT.decode(answer.token_ids[:-1]))
        assert re.fullmatch("[a-z]{1,8}", person["name"])
        assert 1 <= person["age"] <= 999
    assert len(set(ids(mixed)[1::2])) > 1
    alone = engine.serve(free)
    assert ids(mixed)[::2] == ids(alone)
    assert [answer.logprobs for answer in mixed.answers[::2]] == [answer.logprobs for answer in alone.answers]


@pytest.mark.parametrize("seed", range(3))
def test_two_steps_in_flight_draw_what_one_draws(engine, crowd, seed):
    free, bound = crowd
    prompts = [item for pair in zip(free, bound, strict=True) for item in pair]
    late = engine.serve(prompts, stream=LateStream(seed), max_steps_in_flight=2)
    assert ids(late) == ids(engine.serve(prompts))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_preempted_answer_keeps_to_its_grammar(engine, crowd, in_flight):
    free, bound = crowd
    undisturbed = engine.serve(bound + free)
    stream = LateStream(1) if in_flight == 2 else None
    crowded = engine.serve(
        bound + free,
        num_blocks=14,
        max_num_batched_tokens=24,
        max_steps_in_flight=in_flight,
        stream=stream,
    )
    assert crowded.num_preemptions > 3
    assert ids(crowded) == ids(undisturbed)


def test_a_continued_answer_keeps_to_its_grammar(engine, crowd):
    _, bound = crowd
    whole = ids(engine.serve(bound))
    for cut in (1, 5, 11):
        continued = engine.serve(
            [replace(item, output_ids=tokens[:cut]) for item, tokens in zip(bound, whole, strict=True)]
        )
        assert ids(continued) == whole


def test_an_answer_ends_with_its_grammar_even_if_ends_are_ignored_and_too_few_tokens_are_there(engine, prompt, person):
    ends = HeldBackEnds((END_ID,), min_tokens=50, always=(END_ID,))
    run = engine.serve(
        [prompt([3], replace(DRAWN, ignore_end_token=False, max_tokens=60), constraint=partial(person, ends=ends))]
    )
    (answer,) = run.answers
    assert answer.completion.reason is EndReason.END_TOKEN
    assert re.fullmatch(PERSON, TEXT.decode(answer.token_ids[:-1]))


class FailingMatcher:
    """Anything goes, until there is an error."""

    def __init__(self, num_tokens):
        self._num_tokens = num_tokens
        self.error = ""

    def accept(self, token_ids):
        self._num_tokens -= len(token_ids)
        self.error = "" if self._num_tokens > 0 else "grammar: lexer too complex"

    def fill(self, words):
        words[:] = all_words(LARGE)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_matcher_in_error_fails_its_own_request_with_its_message(engine, crowd, prompt, in_flight):
    free, _ = crowd
    failing = prompt([5], DRAWN, constraint=lambda: Constraint(LARGE, matcher=FailingMatcher(4)))
    stream = LateStream(2) if in_flight == 2 else None
    run = engine.serve([*free, failing], max_steps_in_flight=in_flight, stream=stream)
    completion = run.answers[-1].completion
    assert (completion.reason, completion.detail) == (EndReason.ENGINE_ERROR, "grammar: lexer too complex")
    assert len(run.answers[-1].token_ids) == 4
    assert ids(run)[:-1] == ids(engine.serve(free))


def test_a_row_without_candidates_fails_alone_with_possible_reasons(engine, crowd, prompt):
    free, _ = crowd
    nothing = prompt([5], DRAWN, constraint=lambda: Constraint(LARGE, allowed_ids=[7], bad_sequences=[[7]]))
    run = engine.serve([*free, nothing])
    completion = run.answers[-1].completion
    assert completion.reason is EndReason.ENGINE_ERROR
    assert "exclude every token" in completion.detail
    assert ids(run)[:-1] == ids(engine.serve(free))


def test_a_batch_without_constraints_is_sampled_without_masks(engine, prompt, person, monkeypatch):
    seen = []
    sample = engine.ops.sample
    spy = lambda _, logits, batch: seen.append(batch.masks) or sample(logits, batch)  # noqa: E731
    monkeypatch.setattr(type(engine.ops), "sample", spy)
    engine.serve([prompt([5], DRAWN)])
    assert set(seen) == {None}
    engine.serve([prompt([5], DRAWN), prompt([6], replace(DRAWN, max_tokens=4), constraint=person)])
    masks = [masks for masks in seen if masks is not None]
    assert len(masks) == 4, "masks outlive the request that needs them"
    assert all(np.array_equal(mask.rows.numpy() >= 0, [False, True]) for mask in masks)
