import pytest

from loadgen.errors import OptionError, TraceError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.reader import read_trace

FIRST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,0,1087,Conversation log
45.5,GPT-4,417,276,693,API log
118,GPT-4,0,12,12,API log
"""
THIRD = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
1,aa-1,0.5,ChatGPT,10,20,30,Conversation log
2,bb-2,0.5,GPT-4,11,21,32,Conversation log
3,,0.5,GPT-4,12,22,34,API log
4,aa-1,0.5,ChatGPT,13,23,36,Conversation log
"""


def test_failed_requests_are_left_out_by_name(write):
    trace = read_trace(write("BurstGPT_1.csv", FIRST))
    assert trace.format == "burstgpt"
    assert trace.arrival_s.tolist() == [5.0, 45.5]
    assert trace.rows.tolist() == [0, 2]
    assert trace.accounting.read == 4
    assert trace.accounting.dropped == {"failed: 0 response tokens": 1, "0 request tokens": 1}
    assert trace.accounting.kept == 2
    assert trace.sessions is None


def test_columns_are_found_by_name(write):
    trace = read_trace(write("BurstGPT_3.csv", THIRD))
    assert trace.input_tokens.tolist() == [10, 11, 12, 13]
    assert trace.output_tokens.tolist() == [20, 21, 22, 23]
    assert trace.sessions.tolist() == [0, 1, -1, 0]


def test_one_model_alone(write):
    trace = read_trace(write("BurstGPT_3.csv", THIRD), options=ReadOptions(model="GPT-4"))
    assert trace.input_tokens.tolist() == [11, 12]
    assert trace.accounting.dropped == {"of another model than GPT-4": 2}


def test_a_model_that_never_occurs_is_refused(write):
    with pytest.raises(TraceError, match=r"no requests in 4 rows: 4 of another model than gpt-5"):
        read_trace(write("b.csv", THIRD), options=ReadOptions(model="gpt-5"))


def test_a_model_cannot_be_chosen_where_the_format_names_none(write_rows):
    path = write_rows({"arrival_s": 0, "input_tokens": 1, "output_tokens": 1})
    with pytest.raises(OptionError, match=r"--trace-model GPT-4: .* format jsonl, which names no models"):
        read_trace(path, options=ReadOptions(model="GPT-4"))
