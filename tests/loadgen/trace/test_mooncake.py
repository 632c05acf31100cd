import pytest

from loadgen.errors import TraceError
from loadgen.trace.reader import read_trace


def row(timestamp=0, input_length=1000, output_length=7, hash_ids=(0, 1), **more):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
        **more,
    }


def test_milliseconds_become_seconds_and_ids_blocks_of_512(write_rows):
    trace = read_trace(write_rows(row(), row(3001, 512, 500, (0,)), row(3001, 513, 1, (0, 9))))
    assert trace.format == "mooncake"
    assert trace.arrival_s.tolist() == [0.0, 3.001, 3.001]
    assert trace.blocks.block_tokens == 512
    assert [trace.blocks.of(index).tolist() for index in range(3)] == [[0, 1], [0], [0, 9]]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (row(hash_ids=(0,)), "hash_ids has 1 blocks, 1000 tokens are 2 blocks of 512"),
        (row(hash_ids=(0, 1, 2)), "hash_ids has 3 blocks, 1000 tokens are 2 blocks of 512"),
        (row(input_length=1025), "hash_ids has 2 blocks, 1025 tokens are 3 blocks of 512"),
        (row(hash_ids=(0, "1")), "hash_ids is [0, '1'], not a list of whole numbers"),
        (row(hash_ids=(0, 2**63)), "not a list of whole numbers"),
        (row(hash_ids=(0, True)), "not a list of whole numbers"),
        (row(timestamp=None), "timestamp is missing, not a number"),
        (row(timestamp=float("nan")), "timestamp is nan, not a number"),
        (row(timestamp=True), "timestamp is True, not a number"),
        (row(input_length=True), "input_length is True, not a whole number"),
        (row(output_length=0), "output_length is 0, must be 1 to"),
    ],
)
def test_malformed_row_is_refused_with_its_line_and_reason(write_rows, bad, complaint):
    path = write_rows(row(), bad)
    with pytest.raises(TraceError) as refusal:
        read_trace(path)
    assert str(refusal.value).startswith(f"{path}: line 2: ")
    assert complaint in str(refusal.value)
