import json
import math

import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from frontend.text.tokenizer import Tokenizer
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files


@pytest.fixture
def tokenizer():
    tokenizer = Tokenizer(byte_tokenizer_files())
    yield tokenizer
    tokenizer.close()


def test_minus_infinity_becomes_a_json_number(tokenizer):
    logprobs = pb.TokenLogprobs(
        chosen=[-math.inf], top_width=1, top_ids=[256], top_values=[-math.inf], chosen_bytes=[b"a"]
    )
    columns = completion_logprobs(logprobs, tokenizer, TextOffsets())
    assert json.loads(json.dumps(columns, allow_nan=False))["token_logprobs"] == [-9999.0]
    rows = chat_logprobs(logprobs, tokenizer)
    assert json.loads(json.dumps(rows, allow_nan=False))["content"][0]["top_logprobs"][0]["logprob"] == -9999.0


def test_chosen_token_is_always_among_the_alternatives(tokenizer):
    logprobs = pb.TokenLogprobs(chosen=[-7.0], top_width=1, top_ids=[256], top_values=[-0.5], chosen_bytes=[b"a"])
    assert completion_logprobs(logprobs, tokenizer, TextOffsets())["top_logprobs"] == [{"<|end|>": -0.5, "a": -7.0}]


def test_bytes_of_an_incomplete_character_are_complete(tokenizer):
    logprobs = pb.TokenLogprobs(chosen=[-1.0], chosen_bytes=["é".encode()[:1]])
    (row,) = chat_logprobs(logprobs, tokenizer)["content"]
    assert (row["token"], row["bytes"], row["top_logprobs"]) == ("\ufffd", [0xC3], [])
