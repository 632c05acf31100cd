"""The sampler, from logits to token ids, for every kind of request; its floor is one read of the logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.bench.case import Case, Prepared, num_copies
from kernels.bench.device import BenchDevice
from kernels.bench.dims import Dims
from kernels.gpu.sample import sample
from kernels.reference.sample import sample as reference_sample
from kernels.sampling import SamplingBatch, TokenMasks, greedy_batch

_NUM_ROWS = 256
_CHECKED_ROWS = 16
_MAX_SHARE_WRONG = 1 / 16  # draws may differ where the two best scores tie within rounding
_HISTORY = 1024


@dataclass(frozen=True, slots=True)
class Kind:
    """Sampling parameters of a case: fields of `SamplingBatch`, the same for every row except the seed."""

    name: str
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    penalties: float = 0.0
    top_logprobs: int = -1
    masked: bool = False


KINDS = (
    Kind("greedy", temperature=0.0),
    Kind("random"),
    Kind("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    Kind("top-p 0.9", top_p=0.9),
    Kind("min-p 0.05", min_p=0.05),
    Kind("penalties", penalties=0.2),
    Kind("masks of half the tokens", masked=True),
    Kind("greedy, 5 logprobs", temperature=0.0, top_logprobs=5),
)


def sampler_cases(device: BenchDevice, dims: Dims, *, quick: bool) -> Iterator[Case]:
    """Yields every kind for a full batch, and greedy for one row."""
    num_rows = 2 if quick else _NUM_ROWS
    for kind in KINDS:
        yield sampler_case(device, dims.vocab_size, num_rows, kind)
    yield sampler_case(device, dims.vocab_size, 1, KINDS[0])


def sampler_case(device: BenchDevice, vocab_size: int, num_rows: int, kind: Kind) -> Case:
    """Makes a case of rows with the same parameters."""
    return Case(
        what=f"sampler, {kind.name}, {num_rows} rows of {vocab_size:,}",
        prepare=partial(_prepare, device, vocab_size, num_rows, kind),
        num_bytes=num_rows * vocab_size * 4,
        unit="us",
        max_error=_MAX_SHARE_WRONG,
    )


def _prepare(device: BenchDevice, vocab_size: int, num_rows: int, kind: Kind) -> Prepared:
    copies = num_copies(device, num_rows * vocab_size * 4, most=16)
    batch = sampling_batch(kind, num_rows, vocab_size, device.device)
    # The spread of a trained model: a few likely tokens and a long tail.
    logits = [3.0 * torch.randn(num_rows, vocab_size, device=device.device) for _ in range(copies)]

    def call(rows: torch.Tensor) -> torch.Tensor:
        sampled = sample(rows, batch, target=device.target, num_processors=device.num_processors)
        return sampled.token_ids

    def share_wrong() -> float:
        checked = min(num_rows, _CHECKED_ROWS)
        on_cpu = sampling_batch(kind, num_rows, vocab_size, torch.device("cpu"))
        expected = reference_sample(logits[-1][:checked].cpu(), on_cpu).token_ids
        return float((call(logits[-1])[:checked].cpu() != expected).double().mean())

    return Prepared([partial(call, rows) for rows in logits], share_wrong)


def sampling_batch(kind: Kind, num_rows: int, vocab_size: int, device: torch.device) -> SamplingBatch:
    """Returns the same values for every row; the history has 1,024 tokens, half of them prompt."""

    def full(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    mask_rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    history = torch.randint(vocab_size, (num_rows, _HISTORY), dtype=torch.int32, generator=generator)
    return greedy_batch(
        num_rows,
        device,
        temperature=full(kind.temperature),
        top_p=full(kind.top_p),
        min_p=full(kind.min_p),
        repetition_penalty=full(1.0 + kind.penalties),
        presence_penalty=full(kind.penalties),
        frequency_penalty=full(kind.penalties),
        top_k=full(kind.top_k, torch.int32),
        seed=torch.arange(num_rows, device=device),
        position=torch.full((num_rows,), 7, device=device),
        top_logprobs=full(kind.top_logprobs, torch.int32),
        max_top_logprobs=kind.top_logprobs,
        history=history.to(device),
        history_row=torch.arange(num_rows, dtype=torch.int32, device=device),
        num_prompt_tokens=full(_HISTORY // 2, torch.int32),
        num_tokens=full(_HISTORY, torch.int32),
        any_penalised=kind.penalties != 0,
        any_random=kind.temperature != 0,
        any_filtered=kind.temperature != 0 and (kind.top_k > 0 or kind.top_p < 1),
        masks=TokenMasks(mask_rows, words.to(device)) if kind.masked else None,
    )
