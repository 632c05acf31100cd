import json

import numpy as np
import pytest

from loadgen.cli.main import main
from loadgen.trace.reader import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "\r\n".join(
    f"2023-11-16 18:15:{second:02}.5000000,{100 + second},{second + 1}" for second in range(60)
)


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_bytes(AZURE.encode())
    return path


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 3000 * (index // 5), "input_length": 700, "output_length": 9, "hash_ids": [0, index]}
        for index in range(1, 61)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_inspect_prints_the_statistics(azure, capsys):
    assert main(["trace", "inspect", str(azure)]) == 0
    text = capsys.readouterr().out
    assert "azure.csv (azure): 60 requests" in text
    assert "1.017 requests/s over 59 s, CV of gaps 0.00" in text
    prompts = next(line for line in text.splitlines() if line.startswith("prompts")).split()
    assert prompts == [
        "prompts",
        "7,770",
        "129.5",
        "100",
        "100.6",
        "114.8",
        "129.5",
        "144.2",
        "153.1",
        "156.1",
        "158.4",
        "159",
    ]
    assert "60 read = 60 kept + 0 left out" in text
    assert "fit: 100.0% in 1,024" in text
    assert "warning" not in text


def test_inspect_warns_of_a_clock_that_ticks_and_shows_the_reuse(mooncake, capsys):
    assert main(["trace", "inspect", str(mooncake)]) == 0
    text = capsys.readouterr().out
    assert "warning: the clock ticks every 3 s, 13 times for 60 requests" in text
    assert f"holds {59 * 512 / (60 * 700):.2%} of the prompt tokens" in text


def test_a_context_that_one_request_of_many_exceeds_is_not_said_to_fit_all(tmp_path, capsys):
    path = tmp_path / "one.jsonl"
    rows = [{"arrival_s": 0, "input_tokens": tokens, "output_tokens": 5} for tokens in [5] * 2999 + [40_000]]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["trace", "inspect", str(path)]) == 0
    assert "fit: 99.9% in 1,024" in capsys.readouterr().out


def test_convert_keeps_every_request_and_the_digest(mooncake, tmp_path, capsys):
    out = tmp_path / "out.jsonl.gz"
    assert main(["trace", "convert", str(mooncake), str(out)]) == 0
    before, after = read_trace(mooncake), read_trace(out)
    assert after.format == "jsonl"
    assert after.digest == before.digest
    assert np.array_equal(after.blocks.ids, before.blocks.ids)
    assert f"written    {out}" in capsys.readouterr().out


def test_slice_writes_what_replay_would_run(azure, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["trace", "slice", str(azure), str(out), "--window", "10:20", "--limit", "5", "--speed", "2"]) == 0
    part = read_trace(out)
    assert part.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert part.input_tokens.tolist() == [110, 111, 112, 113, 114]
    assert "4 s of trace in 2 s (2x as fast as recorded)" in capsys.readouterr().out


def test_dequantize_spreads_and_refuses_where_there_is_nothing_to_spread(mooncake, azure, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["trace", "dequantize", str(mooncake), str(out), "--seed", "4"]) == 0
    spread = read_trace(out)
    assert len(np.unique(spread.arrival_s)) == 60
    assert np.array_equal(spread.input_tokens, read_trace(mooncake).input_tokens)
    assert main(["trace", "dequantize", str(azure), str(tmp_path / "no.jsonl")]) == 2
    assert "the clock of azure.csv is not quantised" in capsys.readouterr().err
    assert not (tmp_path / "no.jsonl").exists()


def test_a_file_is_not_written_over_itself(mooncake, capsys):
    before = mooncake.read_bytes()
    assert main(["trace", "convert", str(mooncake), str(mooncake)]) == 2
    assert "is the file that is read; name another one" in capsys.readouterr().err
    assert mooncake.read_bytes() == before


def test_mistakes_end_with_one_line_and_status_2(azure, tmp_path, capsys):
    bad = tmp_path / "bad.csv"
    bad.write_text(AZURE.replace("105,6", "105,six"))
    for arguments, complaint in (
        (["inspect", str(tmp_path / "none.csv")], "none.csv: No such file or directory"),
        (["inspect", str(bad)], "bad.csv: line 7: GeneratedTokens is 'six', not a whole number"),
        (["slice", str(azure), str(tmp_path / "x"), "--speed", "2", "--rate", "2"], "--speed and --rate both"),
        (["convert", str(azure), str(tmp_path / "no" / "x.jsonl")], "cannot write"),
    ):
        assert main(["trace", *arguments]) == 2
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1
