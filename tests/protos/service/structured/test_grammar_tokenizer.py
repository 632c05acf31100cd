"""Masks over tokenizers of published kinds, against the text that each token has by construction."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from chairlift.service.structured.grammar_tokenizer import grammar_tokenizer

PIECES = [*"abcé", " ", " b", "a ", "ab", "  ", "bc", "ca", "é b"]
REPLACE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "byte-level": decoders.ByteLevel(),
    "gemma": decoders.Sequence(REPLACE),
    "llama": decoders.Sequence([*REPLACE, decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}
VOCAB_SIZE = 64


def tokenizer_json(kind: str, ids: dict[str, int], special: dict[str, int]) -> str:
    """Returns a tokenizer.json with these ids of `PIECES` and of special tokens."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = {
        byte_level.pre_tokenize_str(text)[0][0] if kind == "byte-level" else text.replace(" ", "▁"): token_id
        for text, token_id in ids.items()
    }
    backend = Tokenizer(models.BPE(vocab=spelled | special, merges=[]))
    backend.decoder = DECODERS[kind]
    backend.add_special_tokens([*special])
    assert {text: backend.token_to_id(text) for text in special} == special
    return backend.to_str()


def allowed(matcher: LLMatcher) -> set[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("step", [1, 3], ids=["without gaps", "with gaps"])
def test_the_allowed_tokens_are_those_whose_text_continues_an_answer(kind: str, step: int) -> None:
    ids = {text: 1 + index * step for index, text in enumerate(PIECES)}
    ends = {"<end>": 1 + len(ids) * step, "<other>": 0}
    tokenizer = grammar_tokenizer(tokenizer_json(kind, ids, ends), VOCAB_SIZE, {*ends.values()})
    rng = random.Random(kind)
    for _ in range(20):
        matcher, text = LLMatcher(tokenizer, "start: /( ?[abé])*/"), ""
        for _ in range(20):
            longer = {piece: text + piece for piece in ids}
            following = [piece for piece in ids if "  " not in longer[piece] and "c" not in longer[piece]]
            expected = {ids[piece] for piece in following} | (set() if text.endswith(" ") else {*ends.values()})
            assert allowed(matcher) == expected, text
            piece = rng.choice(following)
            assert matcher.consume_token(ids[piece])
            text += piece


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_end_tokens_need_no_place_among_the_first_ids(kind: str) -> None:
    """Such as Phi-4-mini's, behind ids without a token, or one that only generation_config.json names."""
    ids = {text: index for index, text in enumerate(PIECES)}
    data = tokenizer_json(kind, ids, {"<end>": 40})
    for ends in ({40}, {40, 50}, {40, VOCAB_SIZE + 1000}):
        matcher = LLMatcher(grammar_tokenizer(data, VOCAB_SIZE, ends), 'start: "ab"?')
        assert allowed(matcher) == {ids["a"], ids["ab"], *(end for end in ends if end < VOCAB_SIZE)}


def test_ids_without_a_token_are_never_allowed() -> None:
    ids = {text: 3 * index for index, text in enumerate(PIECES)}
    tokenizer = grammar_tokenizer(tokenizer_json("gemma", ids, {"<end>": 60}), VOCAB_SIZE, {60})
    assert allowed(LLMatcher(tokenizer, r"start: /(.|\n)*/")) == {*ids.values(), 60}


def test_added_tokens_that_the_model_lacks_are_left_out() -> None:
    """Such as the padding token of many fine-tunes of Llama 2, whose embedding was not extended."""
    ids = {text: index for index, text in enumerate(PIECES)}
    data = tokenizer_json("llama", ids, {"<end>": VOCAB_SIZE - 1, "<pad>": VOCAB_SIZE})
    matcher = LLMatcher(grammar_tokenizer(data, VOCAB_SIZE, {VOCAB_SIZE - 1}), 'start: "ab"?')
    assert allowed(matcher) == {ids["a"], ids["ab"], VOCAB_SIZE - 1}


@pytest.mark.parametrize("ends", [set(), {VOCAB_SIZE}])
def test_a_model_without_an_end_token_is_refused(ends: set[int]) -> None:
    with pytest.raises(ValueError, match="no end token"):
        grammar_tokenizer(tokenizer_json("gemma", {"a": 0}, {}), VOCAB_SIZE, ends)


@pytest.mark.parametrize(
    "data", ["{}", '{"decoder": {"decoders": [{}]}, "model": {"vocab": {}}, "added_tokens": []}', "{"]
)
def test_malformed_files_are_refused(data: str) -> None:
    with pytest.raises(ValueError):
        grammar_tokenizer(data, VOCAB_SIZE, {1})
