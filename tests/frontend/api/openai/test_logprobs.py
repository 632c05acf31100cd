import json
import math

import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.json_response import event_pieces
from frontend.api.http.json_writer import json_pieces
from frontend.api.http.response_builder import NAMED_EVENTS
from frontend.api.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from frontend.slices import at_once
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
    columns = at_once(completion_logprobs(logprobs, tokenizer, TextOffsets()))
    assert json.loads(json.dumps(columns, allow_nan=False))["token_logprobs"] == [-9999.0]
    (row,) = chat_logprobs(logprobs, tokenizer)["content"]
    assert json.loads(json.dumps(row, allow_nan=False))["top_logprobs"][0]["logprob"] == -9999.0


def test_chosen_token_is_always_among_the_alternatives(tokenizer):
    logprobs = pb.TokenLogprobs(chosen=[-7.0], top_width=1, top_ids=[256], top_values=[-0.5], chosen_bytes=[b"a"])
    columns = at_once(completion_logprobs(logprobs, tokenizer, TextOffsets()))
    assert columns["top_logprobs"] == [{"<|end|>": -0.5, "a": -7.0}]


def test_rows_are_made_and_written_a_few_at_a_time(tokenizer, monkeypatch):
    num_tokens = 1000
    logprobs = pb.TokenLogprobs(
        chosen=[-1.0] * num_tokens,
        chosen_bytes=[b"a"] * num_tokens,
        top_width=20,
        top_ids=range(20 * num_tokens),
        top_values=[-2.0] * 20 * num_tokens,
    )
    num_read = [0]

    def token_bytes(token_id):
        num_read[0] += 1
        return b"a"

    monkeypatch.setattr(tokenizer, "token_bytes", token_bytes)
    answer = json_pieces({"choices": [{"logprobs": chat_logprobs(logprobs, tokenizer)}]})
    for work in (answer, completion_logprobs(logprobs, tokenizer, TextOffsets())):
        total = before = num_read[0]
        for piece in work:
            assert num_read[0] - before <= 8 * 20
            assert piece is None or len(piece) < 1 << 14
            before = num_read[0]
        assert num_read[0] - total == 20 * num_tokens


ROWS = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}] * 5000
PART = {"type": "output_text", "text": "a", "logprobs": ROWS}
ITEM = {"type": "message", "content": [PART]}


@pytest.mark.parametrize(
    "members", [{"logprobs": ROWS}, {"part": PART}, {"item": ITEM}, {"response": {"output": [ITEM]}}], ids=list
)
def test_events_of_responses_are_written_in_pieces(members):
    event = {"type": "response.done", **members}
    pieces = list(event_pieces([event], NAMED_EVENTS))
    assert max(map(len, pieces)) < 1 << 11
    assert json.loads("".join(pieces).partition("data: ")[2]) == event


def test_bytes_of_an_incomplete_character_are_complete(tokenizer):
    logprobs = pb.TokenLogprobs(chosen=[-1.0], chosen_bytes=["é".encode()[:1]])
    (row,) = chat_logprobs(logprobs, tokenizer)["content"]
    assert (row["token"], row["bytes"], row["top_logprobs"]) == ("\ufffd", [0xC3], [])
