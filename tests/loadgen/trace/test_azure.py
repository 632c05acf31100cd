import pytest

from loadgen.errors import TraceError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.reader import read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def test_reads_crlf_seven_digits_and_a_last_line_without_an_end(write):
    text = HEADER + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:46.6805901,396,109\r\n"
    trace = read_trace(write("conv.csv", text + "2023-11-16 18:15:48.0000000,879,55"))
    assert trace.format == "azure"
    assert trace.arrival_s.tolist() == [0.0, 1e-7, 1.31941]
    assert trace.input_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.rows.tolist() == [0, 1, 2]
    assert trace.blocks is None
    assert trace.sessions is None
    assert trace.accounting.read == trace.accounting.kept == 3


def test_counts_across_midnight_and_the_end_of_a_year(write):
    text = HEADER + "2023-12-31 23:59:59.5000000,1,1\r\n2024-01-01 00:00:00.2500000,1,1\r\n"
    assert read_trace(write("t.csv", text)).arrival_s.tolist() == [0.0, 0.75]


def test_reads_the_form_of_2024(write):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01,9,5\n"
    assert read_trace(write("week.csv", text)).arrival_s.tolist() == [0.0, 0.99007]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("2023-11-16T18:15:46.68,1,1", "TIMESTAMP is '2023-11-16T18:15:46.68'"),
        ("2023-13-16 18:15:46.6805900,1,1", "TIMESTAMP is '2023-13-16"),
        ("2023-11-16 18:15:46.1234567890,1,1", "TIMESTAMP is"),
        ("2023-11-16 18:15:46.6805900,,1", "ContextTokens is '', not a whole number"),
        ("2023-11-16 18:15:46.6805900,12.5,1", "ContextTokens is '12.5'"),
        ("2023-11-16 18:15:46.6805900,1_0,1", "ContextTokens is '1_0'"),
        ("2023-11-16 18:15:46.6805900,0,1", "ContextTokens is 0, must be 1 to 2147483647"),
        ("2023-11-16 18:15:46.6805900,7,-3", "GeneratedTokens is -3"),
        ("2023-11-16 18:15:46.6805900,7", "2 columns, the header has 3"),
        ("2023-11-16 18:15:46.6805900,7,8,9", "4 columns, the header has 3"),
    ],
)
def test_malformed_row_is_refused_with_its_line_and_reason(write, row, complaint):
    path = write("conv.csv", HEADER + "2023-11-16 18:15:46.6805900,374,44\r\n" + row + "\r\n")
    with pytest.raises(TraceError) as refusal:
        read_trace(path)
    assert f"{path}: line 3: {complaint}" in str(refusal.value)


def test_a_sorted_file_counts_from_its_earliest_row(write):
    rows = [f"2023-11-16 18:0{minute}:00.5000000,{tokens},5\r\n" for minute, tokens in ((1, 7), (0, 8), (3, 9))]
    trace = read_trace(write("conv.csv", HEADER + "".join(rows)), options=ReadOptions(sort=True))
    assert trace.arrival_s.tolist() == [0.0, 60.0, 180.0]
    assert trace.input_tokens.tolist() == [8, 7, 9]


def test_a_malformed_first_row_that_is_left_out_does_not_start_the_clock(write):
    rows = ("18:05:00.0000000,x,5", "18:15:00.5000000,7,5", "18:15:02.0000000,8,5")
    path = write("conv.csv", HEADER + "".join(f"2023-11-16 {row}\r\n" for row in rows))
    assert read_trace(path, options=ReadOptions(skip_malformed=True)).arrival_s.tolist() == [0.0, 1.5]
