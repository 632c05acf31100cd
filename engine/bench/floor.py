"""Lower bounds of execution time: weights and KV cache read once per step, products at the rate the machine reached.

For any dense decoder, from the sizes in its config.json and rates measured in the same run. "Sequential" adds up
operations that each are perfect; "overlap" lets products and reads run at the same time and is harder. Approximations,
all far below a percent: embeddings, norms and activations are free, the cache's writes too, and every output token is
counted as a decode row, the first included.

Pure: no torch, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Length(NamedTuple):
    """Tokens of one request: its prompt and its answer."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """Sizes of a dense decoder that determine its time.

    Attributes:
        body_weights: of the matrices inside all layers.
        head_weights: of the output matrix.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    body_weights: int
    head_weights: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DecoderSize":
        """Returns the sizes from a config.json: gated feed-forward, grouped queries."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        layers = config["num_hidden_layers"]
        return cls(
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            body_weights=layers * (attention + 3 * hidden * config["intermediate_size"]),
            head_weights=hidden * config["vocab_size"],
        )

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_flop_per_pair(self) -> int:
        """Operations of one query token with one key token in all layers: two products, two operations each."""
        return 4 * self.num_heads * self.head_dim * self.num_layers


class Precision(NamedTuple):
    """Bytes per value: of the body's weights, of the head's, and of the cache (its scales are not counted)."""

    name: str
    weight_bytes: int
    head_bytes: int
    kv_bytes: int


BF16 = Precision("bf16", 2, 2, 2)
FP8 = Precision("fp8", 1, 2, 1)


class Rates(NamedTuple):
    """Rates of the machine on large inputs.

    Attributes:
        bytes_per_s: of a copy, read and written bytes both counted.
        body_flops: of products in the precision of the body's weights, per second.
        flops: of products in the model's own precision: head and attention.
    """

    bytes_per_s: float
    body_flops: float
    flops: float


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of one model in one precision on one machine."""

    size: DecoderSize
    precision: Precision
    rates: Rates

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read in every step, whatever its size."""
        size, precision = self.size, self.precision
        return size.body_weights * precision.weight_bytes + size.head_weights * precision.head_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return self.size.kv_values_per_token * self.precision.kv_bytes

    def linear_s(self, num_tokens: float, num_sampled: float) -> float:
        """Returns the seconds of all matrix products of a step: reading or computing, whichever takes longer."""
        read_s = self.weight_bytes / self.rates.bytes_per_s
        return max(read_s, num_tokens * self._body_s_per_token + num_sampled * self._head_s_per_token)

    def decode_attention_s(self, num_context_tokens: float) -> float:
        """Returns the seconds of attention of decode rows: the KV cache of their contexts is read once."""
        return num_context_tokens * self.kv_bytes_per_token / self.rates.bytes_per_s

    def prefill_attention_s(self, num_tokens: float) -> float:
        """Returns the seconds of causal attention of a prompt: half of all pairs of its tokens."""
        return self.size.attention_flop_per_pair * num_tokens**2 / 2 / self.rates.flops

    def decode_step_s(self, batch: int, context: float) -> float:
        """Returns the seconds of a step in which `batch` requests of this context decode."""
        return self.linear_s(batch, batch) + self.decode_attention_s(batch * context)

    def prefill_s(self, num_tokens: int) -> float:
        """Returns the seconds of a single prompt, to its first token."""
        return self.linear_s(num_tokens, 1) + self.prefill_attention_s(num_tokens)

    def seconds_per_output_token(self, lengths: Sequence[Length], batch: int) -> float:
        """Returns the sequential floor of serving requests of these lengths in steady state, `batch` at a time.

        Prompts are computed in steps large enough to be bound by their products; every output token takes its share of
        a decode step of `batch` rows.
        """
        return self.decode_s_per_output_token(lengths, batch) + self.prompt_s_per_output_token(lengths)

    def decode_s_per_output_token(self, lengths: Sequence[Length], batch: int) -> float:
        """Returns the part of decode steps."""
        total = _Totals.of(lengths)
        return self.linear_s(batch, batch) / batch + self.decode_attention_s(total.context_tokens) / total.output_tokens

    def prompt_s_per_output_token(self, lengths: Sequence[Length]) -> float:
        """Returns the part of prompts."""
        total = _Totals.of(lengths)
        attention_s = self.size.attention_flop_per_pair * total.squared_prompts / 2 / self.rates.flops
        return (total.prompt_tokens * self._body_s_per_token + attention_s) / total.output_tokens

    def overlapped_seconds_per_output_token(self, lengths: Sequence[Length], batch: int) -> float:
        """Returns the same if reading and computing overlap perfectly (NanoFlow, arXiv:2408.12757)."""
        total = _Totals.of(lengths)
        pairs = total.squared_prompts / 2 + total.context_tokens
        compute_s = (total.prompt_tokens + total.output_tokens) * self._body_s_per_token
        compute_s += total.output_tokens * self._head_s_per_token
        compute_s += self.size.attention_flop_per_pair * pairs / self.rates.flops
        read_s = total.output_tokens / batch * self.weight_bytes / self.rates.bytes_per_s
        read_s += self.decode_attention_s(total.context_tokens)
        return max(compute_s, read_s) / total.output_tokens

    def all_at_once_s(self, lengths: Sequence[Length]) -> float:
        """Returns the sequential floor of requests that arrive at once and all run until they are done."""
        total = _Totals.of(lengths)
        seconds = self.linear_s(total.prompt_tokens, len(lengths)) + self.decode_attention_s(total.context_tokens)
        seconds += self.size.attention_flop_per_pair * total.squared_prompts / 2 / self.rates.flops
        left = sorted(length.output for length in lengths)
        steps_before = 0
        for index, steps in enumerate(left):
            rows = len(left) - index
            seconds += (steps - steps_before) * self.linear_s(rows, rows)
            steps_before = steps
        return seconds

    @property
    def _body_s_per_token(self) -> float:
        return 2 * self.size.body_weights / self.rates.body_flops

    @property
    def _head_s_per_token(self) -> float:
        return 2 * self.size.head_weights / self.rates.flops


class _Totals(NamedTuple):
    """Sums over requests; context_tokens counts, for every output token, the tokens before it."""

    prompt_tokens: int
    output_tokens: int
    context_tokens: float
    squared_prompts: int

    @classmethod
    def of(cls, lengths: Sequence[Length]) -> "_Totals":
        return cls(
            prompt_tokens=sum(length.prompt for length in lengths),
            output_tokens=sum(length.output for length in lengths),
            context_tokens=sum(length.output * (length.prompt + length.output / 2) for length in lengths),
            squared_prompts=sum(length.prompt**2 for length in lengths),
        )
