"""Figures expected of an H200 as shares of the floor, so that a first measurement can be judged at once.

They are estimates from the compiled kernels (registers, shared memory, order of instructions), not measurements.
docs/gpu.md shows them as times of Llama-3.1-8B.
"""

from typing import NamedTuple

from chairlift.bench.report import Direction, format_number


class Expected(NamedTuple):
    """Range of an expected figure.

    Attributes:
        low, high: shares of the floor, at most 1.
        main_cost: what takes most of the time above the floor.
    """

    low: float
    high: float
    main_cost: str

    def bounds(self, floor: float, direction: Direction) -> tuple[float, float]:
        """Returns the range in the unit of the floor: a time ("at most") or a rate ("at least")."""
        if direction == "at most":
            return floor / self.high, floor / self.low
        return self.low * floor, self.high * floor

    def note(self, floor: float, unit: str, direction: Direction) -> str:
        """Returns the range in words, for the note of a result."""
        low, high = self.bounds(floor, direction)
        return f"expected {format_number(low)} to {format_number(high)} {unit} ({self.main_cost})"


DECODE_STEPS = {
    ("bf16", 1): Expected(0.70, 0.76, "products of one row, about 300 gaps between kernels"),
    ("bf16", 64): Expected(0.72, 0.79, "products 4.2 ms, attention 2.6 ms"),
    ("bf16", 256): Expected(0.78, 0.83, "attention 10 ms"),
    ("fp8", 256): Expected(0.63, 0.71, "attention 6 ms"),
}
"""By precision and batch, at contexts of about 1,000 tokens."""

PREFILL_STEPS = {
    2_048: Expected(0.85, 0.88, "products at 88 % of the measured rate"),
    8_192: Expected(0.80, 0.85, "attention 36 ms"),
    32_768: Expected(0.72, 0.79, "attention 0.57 s"),
}
"""By length of the prompt, in bf16."""

DECODE_ATTENTION = {
    16: Expected(0.75, 0.82, "reductions across warps"),
    8: Expected(0.60, 0.70, "copies of 8 bytes, two programs per multiprocessor"),
}
"""By bits of a KV value."""

PREFILL_ATTENTION = Expected(0.55, 0.70, "softmax beside the products")
"""In bf16."""
