import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from chairlift.service.structured.parser_limits import parser_limits
from frontend.text.sampling_defaults import API_DEFAULTS
from frontend.text.served_model import ServedModel
from frontend.text.tokenizer import Tokenizer
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE, byte_tokenizer_files


@pytest.fixture
def model():
    """A model with one token per byte."""
    tokenizer = Tokenizer(byte_tokenizer_files())
    yield ServedModel(
        name="fake",
        weights_revision="none",
        max_model_len=4096,
        vocab_size=VOCAB_SIZE,
        end_token_ids=(END_TOKEN_ID,),
        max_logprobs=20,
        tokenizer=tokenizer,
        defaults=API_DEFAULTS,
    )
    tokenizer.close()


@pytest.fixture(scope="session")
def draw():
    """draw(grammar, rng) returns a random text that the grammar allows, or None if it is longer than `max_tokens`.

    Each byte is drawn uniformly from those that the library's mask allows.
    """
    tokenizer = Tokenizer(byte_tokenizer_files())
    texts = [tokenizer.token_bytes(token_id) for token_id in range(END_TOKEN_ID)]
    vocabulary = LLTokenizer(tokenizer.to_json(), n_vocab=VOCAB_SIZE, eos_token=[END_TOKEN_ID])
    tokenizer.close()

    def make(grammar: str, rng: random.Random, max_tokens: int = 1000) -> str | None:
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        written = b""
        for _ in range(max_tokens):
            mask = matcher.compute_bitmask()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: END_TOKEN_ID + 1]
            token_id = int(rng.choice(np.flatnonzero(bits)))
            if token_id == END_TOKEN_ID:
                return written.decode()
            assert matcher.consume_token(token_id)
            written += texts[token_id]
        return None

    return make


@pytest.fixture(scope="session")
def keeps_to():
    """keeps_to(grammar, text) returns whether the grammar allows the text."""
    tokenizer = Tokenizer(byte_tokenizer_files())
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(END_TOKEN_ID)}
    vocabulary = LLTokenizer(tokenizer.to_json(), n_vocab=VOCAB_SIZE, eos_token=[END_TOKEN_ID])
    tokenizer.close()

    def check(grammar: str, text: str) -> bool:
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        assert not matcher.is_error(), matcher.get_error()
        token_ids = [ids[bytes([byte])] for byte in text.encode()]
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return check
