"""The expected figures in docs/gpu.md are those that the benchmarks print, at the page's rates of an H200."""

import json
from pathlib import Path

import pytest

from chairlift.bench.report import Direction, format_number
from engine.bench.floor import BF16, FP8, DecoderSize, Floor, Length, Rates
from engine.bench.gpu.expected import IDLE, SAMPLER, ExpectedRange, expected_mix, expected_over_transformers
from engine.bench.gpu.lengths import SHAREGPT_LIKE, sample_lengths
from engine.model.shapes import find_shape
from kernels.bench.expected import DECODE_ATTENTION, DECODE_STEPS, PREFILL_ATTENTION, PREFILL_STEPS, Expected

PAGE = (Path(__file__).parents[3] / "docs/gpu.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.count("|") == 7]
COPY_RATE_PERCENT, TFLOPS = 100.0, 790.0


@pytest.fixture(scope="module")
def floors() -> dict[str, Floor]:
    folder = find_shape("llama-3.1-8b")
    assert folder is not None
    size = DecoderSize.from_config(json.loads((folder / "config.json").read_text()))
    return {
        "bf16": Floor(size, BF16, Rates(4.3e12, TFLOPS * 1e12, TFLOPS * 1e12)),
        "fp8": Floor(size, FP8, Rates(4.3e12, 1400e12, TFLOPS * 1e12)),
    }


def assert_row(name: str, expected: Expected, floor: float, unit: str, direction: Direction) -> None:
    """Asserts that the page has the row, with the range and the main cost."""
    (row,) = (row for row in ROWS if row[0] == name)
    low, high = map(format_number, expected.bounds(floor, direction))
    assert row[3] == f"{low} to {high} {unit}"
    assert row[5] == expected.main_cost
    assert expected.note(floor, unit, direction) == f"expected {low} to {high} {unit} ({expected.main_cost})"


def assert_step(name: str, expected: Expected, floor_s: float, reads: str) -> None:
    (row,) = (row for row in ROWS if row[0] == name)
    assert row[1:3] == [reads, f"{format_number(1e3 * floor_s)} ms"]
    assert_row(name, expected, 1e3 * floor_s, "ms", "at most")


def test_expected_steps_of_the_page(floors: dict[str, Floor]) -> None:
    for (precision, batch), expected in DECODE_STEPS.items():
        floor = floors[precision]
        num_bytes = floor.weight_bytes + 1024 * batch * floor.kv_bytes_per_token
        name = f"decode, batch {batch}, context 1,024, {precision}"
        assert_step(name, expected, floor.decode_step_s(batch, 1024), f"{num_bytes / 1e9:.1f} GB")
    for length, expected in PREFILL_STEPS.items():
        floor_s = floors["bf16"].prefill_s(length)
        reads = f"{format_number(floor_s * TFLOPS)} TFLOP"
        assert_step(f"prefill of {length:,}, bf16", expected, floor_s, reads)


def test_expected_kernels_of_the_page() -> None:
    assert_row("decode attention, bf16", DECODE_ATTENTION[16], COPY_RATE_PERCENT, "%", "at least")
    assert_row("decode attention, fp8 cache", DECODE_ATTENTION[8], COPY_RATE_PERCENT, "%", "at least")
    assert_row("prefill attention, bf16", PREFILL_ATTENTION, TFLOPS, "TFLOP/s", "at least")


def test_expected_mixes_of_the_page(floors: dict[str, Floor]) -> None:
    rows = [row for row in ROWS if row[0].startswith(("G4", "G5", "G6", "G7"))]
    assert len(rows) == 7
    for goal, case, parts, printed_floor, printed, _ in rows:
        lengths = [Length(*(int(part.replace(",", "")) for part in case.split("/")))] if "/" in case else None
        lengths = lengths or sample_lengths(SHAREGPT_LIKE)
        floor = floors[goal[-4:].strip(" ,")]
        decode_s, prompt_s = floor.decode_s_per_output_token(lengths, 512), floor.prompt_s_per_output_token(lengths)
        assert parts == f"{1e6 * decode_s:.1f} + {1e6 * prompt_s:.1f} µs"
        rate = 1 / (decode_s + prompt_s)
        assert printed_floor.removesuffix(" tokens/s") == f"{rate:,.0f}"
        expected = expected_mix(floor, lengths, 512)
        assert expected is not None
        low, high = expected.bounds(rate, "at least")
        assert printed == f"{low:,.0f} to {high:,.0f}"


def test_expected_ranges_of_the_page(floors: dict[str, Floor]) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.count("|") == 4]
    over_transformers = expected_over_transformers(floors["bf16"], 32, 512 + 2048 / 2)
    ranges: dict[str, ExpectedRange] = {"G9": over_transformers, "G13": IDLE, "G14": SAMPLER}
    for goal, expected in ranges.items():
        (row,) = (row for row in rows if row[0].startswith(f"{goal},"))
        assert row[1:] == [expected.text, expected.derivation]
        assert expected.note == f"expected {row[1]} ({row[2]})"
