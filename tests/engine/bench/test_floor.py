"""Floors, against the published table: an H200 at 4.3 TB/s, 790 TFLOP/s in bf16 and 1,400 in fp8."""

import json
import random
from dataclasses import replace

import pytest

from engine.bench.floor import BF16, FP8, DecoderSize, Floor, Length, Rates
from engine.model.shapes import find_shape

MEMORY_BYTES = 125e9  # for weights and cache
SLACK = 0.002  # what the table's own rounding of its inputs moves its last digit by


def size_of(shape: str) -> DecoderSize:
    folder = find_shape(shape)
    assert folder is not None
    return DecoderSize.from_config(json.loads((folder / "config.json").read_text()))


LLAMA_8B = size_of("llama-3.1-8b")
AS_PUBLISHED = replace(LLAMA_8B, body_weights=6_979_000_000, head_weights=525_000_000)  # rounded like this
BF16_FLOOR = Floor(AS_PUBLISHED, BF16, Rates(4.3e12, 790e12, 790e12))
FP8_FLOOR = Floor(AS_PUBLISHED, FP8, Rates(4.3e12, 1400e12, 790e12))


def assert_prints_as(value: float, printed: str, slack: float = SLACK) -> None:
    """Asserts that a value rounds to a printed number."""
    half_a_digit = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    assert abs(value - float(printed)) <= half_a_digit + slack * value, f"{value:.4f} is not {printed}"


def test_sizes_of_llama_8b() -> None:
    assert LLAMA_8B.body_weights == pytest.approx(6.979e9, rel=1e-4)
    assert LLAMA_8B.head_weights == pytest.approx(0.525e9, rel=1e-3)
    assert LLAMA_8B.attention_flop_per_pair == 524_288
    assert BF16_FLOOR.kv_bytes_per_token == 131_072
    assert FP8_FLOOR.kv_bytes_per_token == 65_536
    assert BF16_FLOOR.weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert FP8_FLOOR.weight_bytes == pytest.approx(8.03e9, rel=1e-3)


@pytest.mark.parametrize(
    ("batch", "context", "bf16_ms", "fp8_ms"),
    [
        (1, 256, "3.50", "1.87"),
        (1, 8192, "3.74", "1.99"),
        (16, 256, "3.62", None),
        (16, 8192, "7.49", "3.86"),
        (64, 256, "3.99", None),
        (64, 8192, "19.5", "9.86"),
        (128, 8192, None, "17.9"),
        (256, 2048, "20.8", "10.9"),
    ],
)
def test_decode_steps(batch: int, context: int, bf16_ms: str | None, fp8_ms: str | None) -> None:
    for floor, expected in ((BF16_FLOOR, bf16_ms), (FP8_FLOOR, fp8_ms)):
        if expected is not None:
            assert_prints_as(1e3 * floor.decode_step_s(batch, context), expected)


@pytest.mark.parametrize(
    ("tokens", "thousands_per_s"), [(512, "56.0"), (1024, "55.5"), (2048, "54.5"), (8192, "49.1"), (32768, "35.0")]
)
def test_prefill(tokens: int, thousands_per_s: str) -> None:
    assert_prints_as(tokens / BF16_FLOOR.prefill_s(tokens) / 1e3, thousands_per_s)


def test_prefill_in_8_bits() -> None:
    assert_prints_as(1e3 * FP8_FLOOR.prefill_s(1024), "10.6")


def batch_that_fits(floor: Floor, length: Length) -> int:
    """Returns the requests that fit beside the weights at their mean length, up to 1024."""
    mean_context = length.prompt + length.output / 2
    return min(1024, int((MEMORY_BYTES - floor.weight_bytes) / (mean_context * floor.kv_bytes_per_token)))


@pytest.mark.parametrize(
    ("prompt", "output", "bf16", "fp8"),
    [
        (128, 128, "23.5", "41.2"),
        (202, 179, "20.9", "36.9"),
        (1000, 1000, "12.1", "22.5"),
        (1024, 128, "5.1", "9.1"),
        (2048, 2048, "7.6", "14.5"),
        (20000, 2000, "1.03", "1.97"),
    ],
)
def test_whole_workloads(prompt: int, output: int, bf16: str, fp8: str) -> None:
    for floor, expected in ((BF16_FLOOR, bf16), (FP8_FLOOR, fp8)):
        lengths = [Length(prompt, output)]
        batch = batch_that_fits(floor, *lengths)
        assert_prints_as(1e-3 / floor.seconds_per_output_token(lengths, batch), expected)


def test_overlap_is_a_harder_floor() -> None:
    lengths = [Length(1000, 1000)]
    for floor, expected in ((BF16_FLOOR, "19.2"), (FP8_FLOOR, "40.5")):
        batch = batch_that_fits(floor, *lengths)
        assert_prints_as(1e-3 / floor.overlapped_seconds_per_output_token(lengths, batch), expected)


def test_lengths_are_weighted_by_their_cost() -> None:
    mixed = [Length(100, 10), Length(10, 100)]
    parts = [BF16_FLOOR.seconds_per_output_token([length], 200) * length.output for length in mixed]
    assert BF16_FLOOR.seconds_per_output_token(mixed, 200) == pytest.approx(sum(parts) / 110)


def test_requests_that_arrive_at_once() -> None:
    """The benchmark of nano-vllm: 256 requests, lengths from its own seed."""
    random.seed(0)
    prompts = []
    for _ in range(256):
        prompts.append(random.randint(100, 1024))
        for _ in range(prompts[-1]):
            random.randint(0, 10000)
    lengths = [Length(prompt, random.randint(100, 1024)) for prompt in prompts]
    assert (sum(length.prompt for length in lengths), sum(length.output for length in lengths)) == (142_827, 133_966)
    for shape, expected in (("qwen3-0.6b", "36.3"), ("llama-3.1-8b", "13.3")):
        floor = Floor(size_of(shape), BF16, Rates(4.3e12, 790e12, 790e12))
        assert_prints_as(133.966 / floor.all_at_once_s(lengths), expected, slack=0.005)
