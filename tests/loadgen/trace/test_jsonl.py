import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from loadgen.errors import ResultError, TraceError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.jsonl import write_jsonl
from loadgen.trace.reader import read_trace
from loadgen.trace.schema import workload_digest


def row(arrival_s=0.0, **more):
    return {"arrival_s": arrival_s, "input_tokens": 5, "output_tokens": 2, **more}


def test_blocks_of_any_size_and_sessions_by_number_or_name(write_rows):
    trace = read_trace(
        write_rows(
            row(blocks=[4, 5], block_tokens=3, session="b"),
            row(0.25, blocks=[4, 6], block_tokens=3),
            row(0.25, blocks=[7, 8], block_tokens=3, session="a"),
            row(9, blocks=[7, 8], block_tokens=3, session="b"),
        )
    )
    assert trace.format == "jsonl"
    assert trace.blocks.block_tokens == 3
    assert trace.blocks.ids.tolist() == [4, 5, 4, 6, 7, 8, 7, 8]
    assert trace.sessions.tolist() == [0, -1, 1, 0]
    assert read_trace(write_rows(row(session=70), row())).sessions.tolist() == [70, -1]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (row(blocks=[1], block_tokens=4), "blocks has 1 blocks, 5 tokens are 2 blocks of 4"),
        (row(blocks=[1, 2]), "block_tokens is missing"),
        (row(block_tokens=4), "blocks is missing"),
        (row(blocks=[1, 2], block_tokens=3), "blocks of 3 tokens, those of the rows above have 0"),
        (row(session=""), "session is an empty text"),
        (row(session=-4), "session is -4"),
        ({"input_tokens": 1, "output_tokens": 1}, "arrival_s is missing"),
        (row(1e999), "arrival_s is inf"),
        (row(1_700_000_000_000), "arrives at 1.7e+12 s, a thousand years off: not seconds?"),
    ],
)
def test_malformed_row_is_refused_with_its_line_and_reason(write_rows, bad, complaint):
    with pytest.raises(TraceError) as refusal:
        read_trace(write_rows(row(), bad))
    assert f"line 2: {complaint}" in str(refusal.value)


def test_arrivals_may_be_missing_where_the_schedule_is_made_up(write_rows):
    path = write_rows({"input_tokens": 5, "output_tokens": 2}, {"input_tokens": 6, "output_tokens": 2})
    assert read_trace(path, options=ReadOptions(timed=False)).arrival_s.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_what_is_written_reads_back_the_same(write_rows, tmp_path, name):
    before = read_trace(
        write_rows(
            row(1.0000001, blocks=[2**62, 5], block_tokens=3, session=3), row(1 / 3 + 1, blocks=[4, 6], block_tokens=3)
        )
    )
    write_jsonl(before, tmp_path / name)
    after = read_trace(tmp_path / name)
    assert after.digest == before.digest == workload_digest(before)
    assert np.array_equal(after.arrival_s, before.arrival_s)
    assert np.array_equal(after.blocks.ids, before.blocks.ids)
    assert after.sessions.tolist() == [3, -1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["trace.jsonl", name])


def test_the_same_trace_is_the_same_file(write_rows, tmp_path):
    trace = read_trace(write_rows(row()))
    write_jsonl(trace, tmp_path / "a.jsonl.gz")
    write_jsonl(trace, tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes())) == row()


def test_nothing_is_left_behind_where_it_cannot_be_written(write_rows, tmp_path):
    trace = read_trace(write_rows(row()))
    with pytest.raises(ResultError, match=r"cannot write .*missing/out\.jsonl: No such file or directory"):
        write_jsonl(trace, tmp_path / "missing" / "out.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ResultError, match="cannot write"):
        write_jsonl(trace, tmp_path / "folder.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.jsonl", "trace.jsonl"]


def test_an_existing_file_survives_a_trace_that_cannot_be_written_whole(write_rows, tmp_path):
    trace = read_trace(write_rows(row(), row(1)))
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    with pytest.raises(TypeError):
        write_jsonl(replace(trace, output_tokens=[1, None]), out)
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "trace.jsonl"]
