import json

import numpy as np
import pytest

from loadgen.errors import TraceError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.reader import read_trace

HEADER = "client_id,window_start_s,rate_rps,iat_cv,iat_family,param1,param2\n"
ARRIVALS = HEADER + (
    "0,0,0.5,1,Gamma,0.25,3\n0,600,0,0,,0,0\n0,1200,2,1,Weibull,0.5,1\n1,0,0,0,,0,0\n1,600,0.1,1,Gamma,4,9\n1,1200,0,0,,0,0\n"
)
LENGTHS = [
    {"client_id": 0, "window_start_s": 0, "input_tokens": {"10": 0.25, "20": 0.75}, "output_tokens": {"7": 1.0}},
    {"client_id": 0, "window_start_s": 1200, "input_tokens": {"30": 1.0}, "output_tokens": {"8": 0.5, "9": 0.5}},
    {"client_id": 1, "window_start_s": 0, "input_tokens": {"500": 1.0}, "output_tokens": {"0": 1.0}},
    {"client_id": 1, "window_start_s": 600, "input_tokens": {}, "output_tokens": {}},
]


@pytest.fixture
def model(write):
    write("m_lengths.jsonl.gz", "".join(json.dumps(row) + "\n" for row in LENGTHS))
    return write("m_arrivals.csv.gz", ARRIVALS)


def test_windows_keep_their_counts_and_lengths(model):
    trace = read_trace(model)
    assert trace.format == "servegen"
    assert len(trace) == trace.accounting.read == trace.accounting.kept == 300 + 1200 + 60
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert np.unique(trace.rows).tolist() == list(range(1560))
    first, second, third = ((trace.arrival_s >= start) & (trace.arrival_s < start + 600) for start in (0, 600, 1200))
    assert (first.sum(), second.sum(), third.sum()) == (300, 60, 1200)
    assert set(trace.input_tokens[first]) == {10, 20}
    assert abs(np.mean(trace.input_tokens[first] == 20) - 0.75) < 0.1
    assert set(trace.output_tokens[first]) == {7}
    assert set(trace.input_tokens[second]) == {500}
    assert set(trace.output_tokens[second]) == {1}  # a request without an answer is asked for one token
    assert set(trace.input_tokens[third]) == {30}
    assert set(trace.output_tokens[third]) == {8, 9}


def test_gaps_have_the_variation_of_their_family(write):
    write("v_lengths.jsonl", json.dumps(LENGTHS[0]) + "\n")
    for family, shape, cv in (("Gamma", 0.25, 2.0), ("Gamma", 4, 0.5), ("Weibull", 0.5, 5**0.5), ("Weibull", 1, 1.0)):
        path = write("v_arrivals.csv", HEADER + f"0,0,100,0,{family},{shape},1\n")
        gaps = np.diff(read_trace(path).arrival_s)
        assert len(gaps) == 59_999
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_windows_that_are_alike_are_drawn_apart(write):
    write("w_lengths.jsonl", json.dumps(LENGTHS[0]) + "\n")
    path = write("w_arrivals.csv", HEADER + "0,0,1,0,Gamma,1,1\n0,600,1,0,Gamma,1,1\n")
    arrival_s = read_trace(path).arrival_s
    assert not np.allclose(arrival_s[:600], arrival_s[600:] - 600)


def test_the_seed_decides(model):
    same, again = read_trace(model), read_trace(model)
    other = read_trace(model, options=ReadOptions(seed=1))
    assert same.digest == again.digest
    assert np.array_equal(same.arrival_s, again.arrival_s)
    assert other.digest != same.digest


def test_a_part_of_the_day_holds_the_same_requests_as_the_day(model):
    day = read_trace(model)
    part = read_trace(model, options=ReadOptions(window_s=(1300.0, 1400.0)))
    in_window = day.arrival_s >= 1200
    assert np.array_equal(part.arrival_s, day.arrival_s[in_window])
    assert np.array_equal(part.input_tokens, day.input_tokens[in_window])
    with pytest.raises(TraceError, match="no requests from 9000 s to 9600 s"):
        read_trace(model, options=ReadOptions(window_s=(9000.0, 9600.0)))


def test_either_file_leads_to_the_other(model, tmp_path):
    assert read_trace(tmp_path / "m_lengths.jsonl.gz").digest == read_trace(model).digest


def test_more_requests_than_fit_ask_for_a_window(write):
    write("big_lengths.jsonl", json.dumps(LENGTHS[0]) + "\n")
    path = write("big_arrivals.csv", HEADER + "0,0,10000,0,Gamma,1,1\n")
    with pytest.raises(TraceError, match="6000000 requests, more than 5000000 at once; choose a part with --window"):
        read_trace(path)


def test_a_folder_as_it_is_published(tmp_path, model):
    folder = tmp_path / "m-small"
    folder.mkdir()
    for client in (0, 1):
        rows = [line.split(",", 1)[1] for line in ARRIVALS.splitlines() if line.startswith(f"{client},")]
        (folder / f"chunk-{client}-trace.csv").write_text("\n".join(rows) + "\n")
        dataset = {
            str(row["window_start_s"]): {
                name: "{" + ", ".join(f"{value}: {share}" for value, share in row[name].items()) + "}"
                for name in ("input_tokens", "output_tokens")
            }
            for row in LENGTHS
            if row["client_id"] == client
        }
        (folder / f"chunk-{client}-dataset.json").write_text(json.dumps(dataset))
    assert read_trace(folder).digest == read_trace(model).digest
    (folder / "chunk-1-dataset.json").unlink()
    with pytest.raises(TraceError, match=r"chunk-1-dataset\.json: No such file"):
        read_trace(folder)
    (folder / "chunk-1-dataset.json").write_text('{"0": {"input_tokens": "__import__(\'os\')"}}')
    with pytest.raises(TraceError, match=r"chunk-1-trace\.csv or the data set beside it is not of format servegen"):
        read_trace(folder)
