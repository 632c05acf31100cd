"""The grown vocabulary and the grammar of the benchmark of masks."""

import json

import numpy as np
from tokenizers import Tokenizer

from engine.bench.masks import _GRAMMAR, grown_tokenizer
from engine.constraints.grammar import GrammarMatcher, GrammarTokenizer
from engine.constraints.token_bits import num_words
from engine.demo import MODEL_DIR

SMALL = (MODEL_DIR / "tokenizer.json").read_bytes()


def test_a_grown_tokenizer_uses_its_tokens() -> None:
    grown = Tokenizer.from_str(grown_tokenizer(SMALL, 20_000).decode())
    assert grown.get_vocab_size() == 20_000
    new = [grown.id_to_token(token_id) for token_id in range(3072, 20_000, 500)]
    ids = [grown.encode(word, add_special_tokens=False).ids for word in new]
    assert sum(max(found) >= 3072 for found in ids) > len(ids) / 2
    assert [grown.decode(found) for found in ids] == [f"{word}" for word in new]


def test_grammar_accepts_an_endless_sequence_of_objects() -> None:
    matcher = GrammarMatcher.compile(_GRAMMAR, GrammarTokenizer(SMALL, 3072, {1}))
    person = {"name": "a", "age": 3, "tags": [], "address": {"street": "b", "zip": "12345"}, "status": "active"}
    tokenizer = Tokenizer.from_str(SMALL.decode())
    for _ in range(3):
        matcher.accept(tokenizer.encode(json.dumps(person), add_special_tokens=False).ids)
        words = np.zeros(num_words(3072), dtype=np.int32)
        matcher.fill(words)
        assert matcher.error == ""
        assert words[0] & 2
        assert np.count_nonzero(words) > 1
