"""Lengths of requests: means, traces, and snapshots of a server in steady state."""

import gzip
from pathlib import Path

import pytest

from engine.bench.floor import Length
from engine.bench.gpu.lengths import (
    AZURE_LIKE,
    SHAREGPT_LIKE,
    in_progress,
    mean_length,
    sample_lengths,
    scaled,
    trace_lengths,
)


@pytest.mark.parametrize(("spreads", "means"), [(AZURE_LIKE, (1155, 211)), (SHAREGPT_LIKE, (202, 179))])
def test_samples_have_their_means(spreads, means) -> None:
    lengths = sample_lengths(spreads)
    assert mean_length(lengths) == pytest.approx(means, abs=1.0)
    assert min(map(min, lengths)) >= 1
    assert max(length.prompt for length in lengths) <= spreads[0].most
    assert max(length.output for length in lengths) <= spreads[1].most
    assert lengths == sample_lengths(spreads)
    assert lengths != sample_lengths(spreads, seed=1)


def test_snapshot_has_long_answers_more_often_at_any_point() -> None:
    lengths = [Length(50, 10), Length(70, 190)]
    found = in_progress(lengths, 4000)
    totals = [sum(length) for length in found]
    assert set(totals) == {60, 260}
    assert totals.count(260) / 4000 == pytest.approx(0.95, abs=0.02)
    left = [length.output for length, total in zip(found, totals, strict=True) if total == 260]
    assert sum(left) / len(left) == pytest.approx(95, abs=4)
    assert min(left) == 1
    assert max(left) == 190


def test_trace_with_carriage_returns_is_read(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\nx,396,109"
    plain, packed = tmp_path / "trace.csv", tmp_path / "trace.csv.gz"
    plain.write_text(text, newline="")
    packed.write_bytes(gzip.compress(text.encode()))
    assert trace_lengths(plain) == trace_lengths(packed) == (Length(374, 44), Length(396, 109))


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", "ContextTokens,GeneratedTokens\n", "ContextTokens,GeneratedTokens\n0,1\n"]
)
def test_file_without_lengths_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=r"x\.csv: "):
        trace_lengths(tmp_path / "x.csv")


def test_scaled_lengths_are_at_least_one() -> None:
    assert scaled([Length(100, 3)], 0.1) == (Length(10, 1),)
