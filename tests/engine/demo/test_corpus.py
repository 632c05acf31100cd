"""Batches of training documents: nothing lost, little padding, short and long together."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.bench.quality import HELD_OUT_DOCUMENTS
from engine.demo import MODEL_DIR
from tests.support.demo_model.corpus import (
    MAX_DOCUMENT_TOKENS,
    PAD_ID,
    Tokens,
    encode_documents,
    make_batches,
    rendered,
    train_tokenizer,
)
from tests.support.demo_model.prompts import HELD_OUT_SPLIT

MAX_TOKENS = 2_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(rendered("test", 0, 0, 200), 800)


@pytest.fixture(scope="module")
def documents(tokenizer: Tokenizer) -> list[Tokens]:
    return encode_documents(tokenizer, "test", 0, 0, 300)


def test_every_document_is_in_exactly_one_batch(documents: list[Tokens]) -> None:
    batches = make_batches(documents, MAX_TOKENS, random.Random(0))
    rows = [row for batch in batches for part in batch.parts for row in part]
    assert sorted(tuple(row[row != PAD_ID]) for row in rows) == sorted(tuple(tokens) for tokens in documents)


def test_padding_stays_on_the_right_and_small(documents: list[Tokens]) -> None:
    batches = make_batches(documents, MAX_TOKENS, random.Random(0))
    parts = [part for batch in batches for part in batch.parts]
    assert all((np.diff((row == PAD_ID).astype(int)) >= 0).all() for part in parts for row in part)
    assert sum((part == PAD_ID).sum() for part in parts) < 0.35 * sum(part.size for part in parts)


def test_batches_hold_about_as_many_tokens_as_asked(documents: list[Tokens]) -> None:
    batches = make_batches(documents, MAX_TOKENS, random.Random(0))
    sizes = [sum(int((part != PAD_ID).sum()) for part in batch.parts) for batch in batches[:-1]]
    assert all(MAX_TOKENS <= size < MAX_TOKENS + MAX_DOCUMENT_TOKENS for size in sizes)


def test_tokenizer_training_is_repeatable(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(rendered("test", 0, 0, 200), 800).to_str() == tokenizer.to_str()


def test_documents_of_the_int8_benchmark_are_held_out() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    held_out = encode_documents(tokenizer, HELD_OUT_SPLIT, 2, 0, 100)
    encodings = tokenizer.encode_batch(json.loads(HELD_OUT_DOCUMENTS.read_text()), add_special_tokens=False)
    assert [encoding.ids for encoding in encodings] == [ids.tolist() for ids in held_out]
