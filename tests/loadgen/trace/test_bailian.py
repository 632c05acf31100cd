import pytest

from loadgen.errors import TraceError
from loadgen.trace.reader import read_trace


def row(chat_id, parent, timestamp, input_length=17, **more):
    return {
        "chat_id": chat_id,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": 3,
        "type": "text",
        "turn": 1,
        "hash_ids": list(range(-(-input_length // 16))),
        **more,
    }


def test_seconds_blocks_of_16_and_conversations_by_their_root(write_rows):
    trace = read_trace(
        write_rows(row(7, -1, 0.0), row(8, -1, 61.114, 16), row(9, 7, 61.5, 33), row(12, 9, 62.0), row(13, 5, 63.0))
    )
    assert trace.format == "bailian"
    assert trace.arrival_s.tolist() == [0.0, 61.114, 61.5, 62.0, 63.0]
    assert trace.blocks.block_tokens == 16
    assert trace.blocks.of(2).tolist() == [0, 1, 2]
    assert trace.sessions.tolist() == [7, 8, 7, 7, 5]  # 5 is named, but came before the file


def test_turns_of_a_conversation_whose_root_came_before_the_file_stay_together(write_rows):
    trace = read_trace(write_rows(row(13, 5, 0.0), row(14, 13, 1.0), row(15, 0, 2.0), row(16, 15, 3.0)))
    assert trace.sessions.tolist() == [5, 5, 0, 0]


def test_is_not_taken_for_mooncake(write_rows):
    assert read_trace(write_rows(row(1, -1, 2.0))).arrival_s.tolist() == [2.0]


def test_blocks_must_cover_the_prompt(write_rows):
    with pytest.raises(TraceError, match="line 1: hash_ids has 1 blocks, 17 tokens are 2 blocks of 16"):
        read_trace(write_rows(row(1, -1, 0, hash_ids=[0])))
