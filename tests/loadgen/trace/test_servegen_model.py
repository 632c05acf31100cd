import json

import pytest

from loadgen.errors import TraceError
from loadgen.trace.servegen_model import load

HEADER = "client_id,window_start_s,rate_rps,iat_cv,iat_family,param1,param2\n"


def lengths(client=0, start_s=0, inputs=None, outputs=None):
    row = {"client_id": client, "window_start_s": start_s}
    return json.dumps({**row, "input_tokens": inputs or {"1": 1.0}, "output_tokens": outputs or {"2": 1.0}}) + "\n"


def test_a_window_ends_where_the_next_begins_and_the_last_is_as_long_as_the_one_before(write):
    write("m_lengths.jsonl", lengths())
    rows = "0,0,1,1,Gamma,1,1\n0,300,0,0,,0,0\n0,900,0.5,1,Weibull,2,1\n"
    first, last = load(write("m_arrivals.csv", HEADER + rows)).windows
    assert (first.start_s, first.length_s, first.num_requests) == (0, 300, 300)
    assert (last.start_s, last.length_s, last.num_requests, last.family, last.shape) == (900, 600, 300, "Weibull", 2.0)
    assert (first.row, last.row) == (0, 2)


def test_lengths_in_force_are_the_last_known_ones(write):
    write("m_lengths.jsonl", lengths(start_s=1200, inputs={"3": 1.0}) + lengths(start_s=600, inputs={"2": 1.0}))
    rows = "".join(f"0,{start},1,1,Gamma,1,1\n" for start in (0, 600, 1199, 1800))
    model = load(write("m_arrivals.csv", HEADER + rows))
    assert [int(model.lengths_of(window).input_tokens.values[0]) for window in model.windows] == [2, 2, 2, 3]


@pytest.mark.parametrize(
    ("arrivals", "length_rows", "complaint"),
    [
        ("0,0,1,1,Pareto,1,1\n", lengths(), "m_arrivals.csv: line 2: 600 requests with gaps of family 'Pareto'"),
        ("0,0,1,1,Gamma,0,1\n", lengths(), "m_arrivals.csv: line 2: 600 requests with gaps of family 'Gamma', shape 0"),
        ("0,0,-1,1,Gamma,1,1\n", lengths(), "line 2: -600 requests"),
        ("0,0,fast,1,Gamma,1,1\n", lengths(), "line 2: rate_rps is 'fast', not a number"),
        ("x,0,1,1,Gamma,1,1\n", lengths(), "line 2: client_id is 'x'"),
        ("0,0,1,1,Gamma\n", lengths(), "line 2: 5 columns, the header has 7"),
        ("0,0,1,1,Gamma,1,1\n", lengths(inputs={"5": 0.4}), "m_lengths.jsonl: line 1: input_tokens have probabilities"),
        ("0,0,1,1,Gamma,1,1\n", lengths(outputs={"a": 1.0}), "line 1: output_tokens are not probabilities"),
        ("0,0,1,1,Gamma,1,1\n", lengths(outputs={"-3": 1.0}), "from -3 tokens on"),
        (
            "0,0,1,1,Gamma,1,1\n",
            lengths() + '{"client_id": 1, "window_start_s": 0, "input_tokens": {}}\n',
            "m_lengths.jsonl: line 2: no output_tokens",
        ),
        ("0,0,1,1,Gamma,1,1\n", '{"client_id": 0}\n', "not of format servegen: no input_tokens, output_tokens"),
    ],
)
def test_rows_that_cannot_be_are_refused_with_file_and_line(write, arrivals, length_rows, complaint):
    write("m_lengths.jsonl", length_rows)
    with pytest.raises(TraceError) as refusal:
        load(write("m_arrivals.csv", HEADER + arrivals))
    assert complaint in str(refusal.value)


def test_a_client_without_lengths_is_refused(write):
    write("m_lengths.jsonl", lengths(client=1))
    model = load(write("m_arrivals.csv", HEADER + "0,0,1,1,Gamma,1,1\n"))
    with pytest.raises(TraceError, match="client 0 has requests from 0 s on, but no lengths"):
        model.lengths_of(model.windows[0])


def test_the_file_beside_it_must_be_there(write):
    path = write("m_arrivals.csv", HEADER + "0,0,1,1,Gamma,1,1\n")
    with pytest.raises(TraceError, match=r"its lengths are missing; neither m_lengths\.jsonl nor m_lengths\.jsonl\.gz"):
        load(path)
    with pytest.raises(TraceError, match=r"is a file named \.\.arrivals\.\."):
        load(write("model.csv", HEADER))
