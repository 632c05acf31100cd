import gzip

import pytest

from loadgen.errors import TraceError
from loadgen.trace.formats import MalformedRowError
from loadgen.trace.records import open_records


def read(path):
    with open_records(path) as records:
        return records.kind, records.names, list(records)


def test_blank_lines_are_no_records_but_count_as_lines(write):
    kind, names, rows = read(write("t.csv", "\n\na, b\n \n1,2\n\n 3 , 4\n\n"))
    assert (kind, names) == ("csv", ("a", "b"))
    assert rows == [(5, {"a": "1", "b": "2"}), (7, {"a": "3", "b": "4"})]
    kind, names, rows = read(write("t.jsonl", '\n{"a": 1}\n\n{"b": 2}'))
    assert (kind, names) == ("jsonl", ("a",))
    assert rows == [(2, {"a": 1}), (4, {"b": 2})]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_name(write, name):
    assert read(write(name, "\ufeffa,b\n1,2\n"))[1] == ("a", "b")


def test_compression_is_seen_by_content_not_by_name(write, tmp_path):
    (tmp_path / "t.csv").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert read(tmp_path / "t.csv")[2] == [(2, {"a": "1", "b": "2"})]


@pytest.mark.parametrize("text", ['{"a": 1', '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": 1} {"a": 2}'])
def test_what_is_no_json_is_a_malformed_row(write, text):
    _, _, rows = read(write("t.jsonl", '{"a": 1}\n' + text + "\n[1]\n"))
    assert rows[0] == (1, {"a": 1})
    assert all(isinstance(record, MalformedRowError) and record.field == "json" for _, record in rows[1:])
    assert [line for line, _ in rows] == [1, 2, 3]


def test_files_that_cannot_be_read_are_named(write, tmp_path):
    whole = gzip.compress(b"a,b\n" + b"1,2\n" * 10_000)
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "sum.csv.gz").write_bytes(whole[:-8] + b"12345678")
    (tmp_path / "block.csv.gz").write_bytes(whole[:10] + b"\xff" + whole[11:])  # a kind of block that does not exist
    (tmp_path / "latin.csv").write_bytes(b"a,b\n\xe9,2\n")
    for name, complaint in (
        ("cut.csv.gz", "the gzip file is damaged"),
        ("sum.csv.gz", "the gzip file is damaged"),
        ("block.csv.gz", "the gzip file is damaged"),
        ("latin.csv", "not text in UTF-8"),
        ("none.csv", "No such file or directory"),
    ):
        with pytest.raises(TraceError) as refusal:
            read(tmp_path / name)
        assert str(refusal.value).startswith(f"{tmp_path / name}: {complaint}")
    for empty in ("", "\n \n"):
        with pytest.raises(TraceError, match="the file is empty"):
            read(write("empty.csv", empty))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_quote_that_is_never_closed_spoils_its_own_row_only(write, end):
    _, _, rows = read(write("t.csv", end.join(('"a",b', '"1","2"', '"3,4', "5,6", '7,"8'))))
    assert [line for line, _ in rows] == [2, 3, 4, 5]
    assert (rows[0][1], rows[2][1]) == ({"a": "1", "b": "2"}, {"a": "5", "b": "6"})
    assert isinstance(rows[1][1], MalformedRowError)
    assert rows[1][1].detail == "1 columns, the header has 2"


def test_a_csv_field_that_never_ends_is_named(write):
    with pytest.raises(TraceError, match="not CSV: field larger than"):
        read(write("t.csv", 'a,b\n"' + "x" * 200_000))
