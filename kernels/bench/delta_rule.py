"""The gated delta rule of one layer: decode steps, bound by the memory of the states, and prompts, by their order."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from kernels.bench.case import Case, Prepared, num_copies, relative_error
from kernels.bench.device import BenchDevice
from kernels.bench.dims import Dims
from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.gpu.delta_rule import delta_rule
from kernels.metadata import AttentionMetadata
from kernels.reference.delta_rule import delta_rule as reference_delta_rule

_DTYPE = torch.bfloat16
_MAX_ERROR = 1e-2
_HEADS = DeltaHeads(num_key_heads=16, key_dim=128, num_value_heads=32, value_dim=128, conv_width=4)
_QUICK_HEADS = DeltaHeads(num_key_heads=1, key_dim=16, num_value_heads=2, value_dim=16, conv_width=4)


def delta_cases(device: BenchDevice, _dims: Dims, *, quick: bool) -> Iterator[Case]:
    """Yields decode steps, prompts alone, and both together, with the heads of Qwen3.5-9B whatever the model is."""
    heads = _QUICK_HEADS if quick else _HEADS
    batches = ((3, 0), (0, 5), (1, 3)) if quick else ((1, 0), (64, 0), (256, 0), (0, 2048), (0, 8192), (64, 1984))
    for num_decodes, num_prompt in batches:
        num_rows, num_tokens = num_decodes + (num_prompt > 0), num_decodes + num_prompt
        read = 4 * num_decodes * heads.state_size + 2 * num_tokens * (heads.num_channels + heads.value_size)
        written = 4 * num_rows * heads.state_size + 2 * num_tokens * heads.value_size
        yield Case(
            what=f"delta_rule, {num_decodes} rows of a token, {num_prompt:,} tokens of a prompt",
            prepare=partial(_prepare, device, heads, num_decodes, num_prompt, read),
            num_bytes=read + written,
            unit="GB/s",
            max_error=_MAX_ERROR,
        )


def _prepare(device: BenchDevice, heads: DeltaHeads, num_decodes: int, num_prompt: int, num_bytes: int) -> Prepared:
    made = [_make(device, heads, num_decodes, num_prompt) for _ in range(num_copies(device, num_bytes))]
    return Prepared([call for call, _ in made], made[-1][1])


def _make(
    device: BenchDevice, heads: DeltaHeads, num_decodes: int, num_prompt: int
) -> tuple[Callable[[], object], Callable[[], float]]:
    """Returns the call on inputs of its own, and how far its result and the states are off."""
    random = partial(torch.randn, device=device.device)
    lengths = [1] * num_decodes + ([num_prompt] if num_prompt else [])
    num_rows, num_tokens = len(lengths), sum(lengths)
    weights = DeltaWeights(
        heads,
        conv=random(heads.conv_width, heads.num_channels),
        decay=torch.exp(random(heads.num_value_heads) - 2),
        dt_bias=random(heads.num_value_heads),
        norm=random(heads.value_dim),
        eps=1e-6,
    )
    states = DeltaStates.zeros(heads, num_rows, device.device)
    states.conv.normal_()
    states.recurrent.normal_()
    x = random(num_tokens, heads.num_channels + heads.value_size).to(_DTYPE)
    gates = random(num_tokens, 2 * heads.num_value_heads).to(_DTYPE)

    def int32(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device.device)

    metadata = AttentionMetadata(
        query_start_loc=int32([0, *lengths]).cumsum(0, dtype=torch.int32),
        seq_lens=int32([100] * num_decodes + lengths[num_decodes:]),
        block_table=torch.zeros(num_rows, 1, dtype=torch.int32, device=device.device),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device.device),
        block_size=16,
        max_query_len=max(lengths),
        max_seq_len=max(100, *lengths),
        state_slots=torch.randperm(num_rows, device=device.device).int(),
    )

    def call() -> object:
        return delta_rule(x, gates, weights, states, metadata)

    def error() -> float:
        expected_states = replace(states, conv=states.conv.clone(), recurrent=states.recurrent.clone())
        expected = reference_delta_rule(x.float(), gates.float(), weights, expected_states, metadata)
        out = delta_rule(x, gates, weights, states, metadata)
        assert isinstance(out, torch.Tensor), "the result is not quantised"
        return max(relative_error(out, expected), relative_error(states.recurrent, expected_states.recurrent))

    return call, error
