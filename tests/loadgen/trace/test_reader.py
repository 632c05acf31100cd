import json

import pytest

from loadgen.errors import OptionError, TraceError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.reader import FORMATS, read_trace


def row(arrival_s, input_tokens=5, **more):
    return {"arrival_s": arrival_s, "input_tokens": input_tokens, "output_tokens": 2, **more}


def test_an_unknown_format_is_refused_with_the_known_ones(write):
    with pytest.raises(TraceError) as refusal:
        read_trace(write("t.csv", "when,how much\n1,2\n"))
    for text in ("of no known format: a csv file with when, how much", "Azure", "Mooncake", "BurstGPT", "Bailian"):
        assert text in str(refusal.value)
    with pytest.raises(TraceError, match="a jsonl file with nothing readable"):
        read_trace(write("t.jsonl", '{"arrival_s": \n'))
    with pytest.raises(OptionError, match="trace format 'parquet' is unknown; there are auto, azure"):
        read_trace(write("t.csv", "a,b\n"), format="parquet")


def test_a_named_format_must_be_right(write, write_rows):
    path = write_rows(row(0))
    assert read_trace(path, format="jsonl").format == "jsonl"
    with pytest.raises(TraceError, match="not of format azure: a jsonl file"):
        read_trace(path, format="azure")
    with pytest.raises(TraceError, match="not of format mooncake: without hash_ids, input_length"):
        read_trace(path, format="mooncake")
    assert {"azure", "mooncake", "burstgpt", "bailian", "servegen", "jsonl", "auto"} == set(FORMATS)


def test_the_digest_is_of_the_requests_not_of_the_file(write, write_rows):
    plain = read_trace(write_rows(row(0), row(1.5)))
    packed = read_trace(write_rows(row(0), row(1.5), name="other.jsonl.gz"))
    spaced = read_trace(
        write("t.jsonl", "\n".join(json.dumps(row(at, more="x"), indent=None) + " " for at in (0.0, 1.5)))
    )
    assert plain.digest == packed.digest == spaced.digest
    assert read_trace(write_rows(row(0), row(1.6))).digest != plain.digest
    assert read_trace(write_rows(row(0), row(1.5, 6))).digest != plain.digest


def test_malformed_rows_are_left_out_and_counted_when_asked(write):
    lines = [
        json.dumps(row(0)),
        "{",
        json.dumps(row(1, 0)),
        json.dumps(row(2)),
        json.dumps(row("x")),
        json.dumps(row(3, -1)),
    ]
    path = write("t.jsonl", "\n".join(lines))
    with pytest.raises(TraceError, match=r"line 2: not JSON: .*; --skip-malformed leaves such rows out"):
        read_trace(path)
    trace = read_trace(path, options=ReadOptions(skip_malformed=True))
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.rows.tolist() == [0, 3]
    assert trace.accounting.read == 6
    assert trace.accounting.dropped == {"malformed: json": 1, "malformed: input_tokens": 2, "malformed: arrival_s": 1}
    assert trace.accounting.kept == len(trace)


def test_a_clock_that_runs_backwards_is_refused_or_sorted(write_rows):
    path = write_rows(row(0, 10), row(5, 11), row(4.5, 12), row(5, 13), row(1, 14))
    with pytest.raises(TraceError) as refusal:
        read_trace(path)
    assert "line 3: arrives at 4.5 s, before the request above it at 5 s (2 such rows); --sort" in str(refusal.value)
    trace = read_trace(path, options=ReadOptions(sort=True))
    assert trace.arrival_s.tolist() == [0.0, 1.0, 4.5, 5.0, 5.0]
    assert trace.input_tokens.tolist() == [10, 14, 12, 11, 13]
    assert trace.rows.tolist() == [0, 4, 2, 1, 3]
    assert trace.accounting.kept == trace.accounting.read == 5
    assert trace.accounting.altered == {"sorted: arrived before the row above": 2}


def test_sorting_keeps_blocks_and_sessions_with_their_requests(write_rows):
    trace = read_trace(
        write_rows(row(1, blocks=[1, 2], block_tokens=4, session=7), row(0, 3, blocks=[3], block_tokens=4, session=8)),
        options=ReadOptions(sort=True),
    )
    assert [trace.blocks.of(index).tolist() for index in range(2)] == [[3], [1, 2]]
    assert trace.sessions.tolist() == [8, 7]


def test_a_file_without_requests_is_refused(write):
    with pytest.raises(TraceError, match="no requests in 0 rows"):
        read_trace(write("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"))
    with pytest.raises(TraceError, match="no requests in 1 rows: 1 malformed: json"):
        read_trace(write("t.jsonl", "{"), format="jsonl", options=ReadOptions(skip_malformed=True))
