"""Figures expected of an H200 for goals that are not steps of one kind, from shares of the floor and counts of kernels.

docs/gpu.md shows them for Llama-3.1-8B. Estimates, not measurements, as those of `kernels.bench.expected`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.bench.floor import Floor, Length
from kernels.bench.expected import DECODE_STEPS, PREFILL_STEPS, Expected

_PREFILL_LEN = 2_048
_MIX_BATCH = 256  # the largest batch with an expected share
_PEER_BATCH = 64  # the nearest to the 32 requests of G9
_PEER_PRODUCTS = 0.83
"""Share of the floor of a decode step's products, 4.2 ms instead of 3.5 for Llama-3.1-8B."""

_PEER_LAUNCHES, _PEER_OTHER_LAUNCHES, _PEER_LAUNCH_S = (40, 50), 27, (5e-6, 8e-6)
"""Kernels of a decode step of transformers 5.23, per layer and besides, and the host's time for each. On a CPU its
Llama calls 40 operations; the paged cache adds up to ten. Without flash-attn it needs masks and records no graphs."""

_PEER_CACHE_PASSES = (3, 11)
"""Reads of the KV cache: gathered (read, written, read), at most also repeated for each of 4 query heads (4 written, 4
read)."""


class ExpectedRange(NamedTuple):
    """Range of an expected figure in its own unit.

    Attributes:
        derivation: what it was computed from.
    """

    low: float
    high: float
    unit: str
    derivation: str

    @property
    def text(self) -> str:
        """The range and its unit."""
        unit = self.unit if self.unit == "x" else f" {self.unit}"
        return f"{self.low:.3g} to {self.high:.3g}{unit}"

    @property
    def note(self) -> str:
        """The range in words, for the note of a result."""
        return f"expected {self.text} ({self.derivation})"


IDLE = ExpectedRange(
    0.25, 0.5, "%", "about 15 small kernels outside the graph with gaps of 1 to 2 µs, in a step of about 6 ms"
)
"""G13."""

SAMPLER = ExpectedRange(
    0.6, 1.2, "%", "three to six passes over 131 MB of logits at 4.3 TB/s, 0.09 to 0.18 ms, in 15.5 to 16.5 ms"
)
"""G14."""


def expected_mix(floor: Floor, lengths: Sequence[Length], batch: int) -> Expected | None:
    """Returns the shares expected of G4 to G7: decode steps and prompts take turns, each with its own share.

    None for a precision without expected steps.
    """
    decodes = DECODE_STEPS.get((floor.precision.name, _MIX_BATCH))
    if decodes is None:
        return None
    prompts = PREFILL_STEPS[_PREFILL_LEN] if floor.precision.name == "bf16" else decodes
    parts = floor.decode_s_per_output_token(lengths, batch), floor.prompt_s_per_output_token(lengths)

    def share(of_decodes: float, of_prompts: float) -> float:
        return sum(parts) / (parts[0] / of_decodes + parts[1] / of_prompts)

    return Expected(share(decodes.low, prompts.low), share(decodes.high, prompts.high), decodes.main_cost)


def expected_over_transformers(floor: Floor, batch: int, context: float) -> ExpectedRange:
    """Returns the range expected of G9: a decode step of `transformers`' continuous batching over one of ours."""
    shares = DECODE_STEPS["bf16", _PEER_BATCH]
    step_s = floor.decode_step_s(batch, context)
    products_s = floor.linear_s(batch, batch) / _PEER_PRODUCTS
    attention_s = floor.decode_attention_s(batch * context)
    theirs_s = [
        max(
            (floor.size.num_layers * per_layer + _PEER_OTHER_LAUNCHES) * launch_s,
            products_s + passes * attention_s,
        )
        for per_layer, launch_s, passes in zip(_PEER_LAUNCHES, _PEER_LAUNCH_S, _PEER_CACHE_PASSES, strict=True)
    ]
    return ExpectedRange(
        theirs_s[0] * shares.low / step_s,
        theirs_s[1] * shares.high / step_s,
        "x",
        f"its step {1e3 * theirs_s[0]:.1f} to {1e3 * theirs_s[1]:.1f} ms without flash-attn: the KV cache is read "
        f"{_PEER_CACHE_PASSES[0]} to {_PEER_CACHE_PASSES[1]} times",
    )
