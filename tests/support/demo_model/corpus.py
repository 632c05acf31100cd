"""From documents to token batches: the tokenizer's training, encoding, and batches of documents.

Each row of a batch is one document from its first token on, padded on the right, just as a prompt starts at inference:
no document sees another, and plain causal attention needs no mask, since padding comes after everything that is
scored.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.demo_model.documents import SPECIAL_TOKENS, document

TRAIN_SPLIT = "train"
PAD_ID = 0
END_ID = 1
MAX_DOCUMENT_TOKENS = 768
_PART_RATIO = 0.66
_MIN_PART_TOKENS = 300

Tokens = NDArray[np.uint16]


class Batch(NamedTuple):
    """The documents of one step, in parts of like length padded on the right: each [num_rows, max_tokens] int64."""

    parts: tuple[NDArray[np.int64], ...]


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE. Every byte is in the vocabulary, so any text survives, and nothing is added to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.token_to_id(SPECIAL_TOKENS[PAD_ID]) == PAD_ID
    assert tokenizer.token_to_id(SPECIAL_TOKENS[END_ID]) == END_ID
    return tokenizer


def rendered(split: str, seed: int, start: int, stop: int) -> Iterator[str]:
    """Documents `start` to `stop` of a split, with their markup."""
    return (document(split, seed, index).render() for index in range(start, stop))


def spoken_texts(split: str, seed: int, start: int, stop: int) -> Iterator[str]:
    """The running text of documents `start` to `stop`, without markup."""
    return (piece for index in range(start, stop) for piece in document(split, seed, index).spoken())


def encode_documents(tokenizer: Tokenizer, split: str, seed: int, start: int, stop: int) -> list[Tokens]:
    """Token ids of documents `start` to `stop`, one array each; the few over MAX_DOCUMENT_TOKENS are left out."""
    encodings = tokenizer.encode_batch(list(rendered(split, seed, start, stop)), add_special_tokens=False)
    return [
        np.array(encoding.ids, dtype=np.uint16) for encoding in encodings if len(encoding.ids) <= MAX_DOCUMENT_TOKENS
    ]


def make_batches(documents: list[Tokens], max_tokens: int, rng: random.Random) -> list[Batch]:
    """Every document once, in random order, in batches of about `max_tokens` tokens.

    A batch mixes short answers with long stories, for a step on answers alone would unlearn stories and the other way
    round; inside it, documents of like length share a part, so that little is padding.
    """
    order = list(documents)
    rng.shuffle(order)
    batches: list[Batch] = []
    chosen: list[Tokens] = []
    num_tokens = 0
    for tokens in order:
        chosen.append(tokens)
        num_tokens += len(tokens)
        if num_tokens >= max_tokens:
            batches.append(_in_parts(chosen))
            chosen, num_tokens = [], 0
    if chosen:
        batches.append(_in_parts(chosen))
    return batches


def _in_parts(documents: list[Tokens]) -> Batch:
    parts: list[NDArray[np.int64]] = []
    rows: list[Tokens] = []
    for tokens in sorted(documents, key=len, reverse=True):
        if rows and len(tokens) < _PART_RATIO * len(rows[0]) and sum(map(len, rows)) >= _MIN_PART_TOKENS:
            parts.append(_pad(rows))
            rows = []
        rows.append(tokens)
    parts.append(_pad(rows))
    return Batch(tuple(parts))


def _pad(rows: list[Tokens]) -> NDArray[np.int64]:
    padded = np.full((len(rows), max(len(row) for row in rows)), PAD_ID, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
