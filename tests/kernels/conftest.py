"""Sampling batches from a few words per row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.sampling import SamplingBatch

_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_k": 0,
    "seed": 0,
    "position": 0,
    "top_logprobs": -1,
    "prompt": (),
    "output": (),
    "bias": {},
}


def _make(rows: list[dict[str, Any]]) -> SamplingBatch:
    full = [{**_DEFAULTS, **row} for row in rows]
    assert all(row.keys() == _DEFAULTS.keys() for row in full), "a row has an unknown field"

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] for row in full], dtype=dtype)

    # Histories lie in another order than the rows, with tokens behind them that belong to nobody.
    max_len = max(len(row["prompt"]) + len(row["output"]) for row in full) + 2
    history = torch.ones(len(full), max_len, dtype=torch.int32)
    for i, row in enumerate(full):
        tokens = [*row["prompt"], *row["output"]]
        history[len(full) - 1 - i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    num_biases = torch.tensor([0, *(len(row["bias"]) for row in full)])
    return SamplingBatch(
        **{
            name: column(name, torch.float64)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
            )
        },
        top_k=column("top_k", torch.int32),
        seed=torch.tensor([row["seed"] - 2**64 * (row["seed"] >= 2**63) for row in full], dtype=torch.int64),
        position=column("position", torch.int64),
        top_logprobs=column("top_logprobs", torch.int32),
        max_top_logprobs=max(row["top_logprobs"] for row in full),
        history=history,
        history_row=torch.arange(len(full) - 1, -1, -1, dtype=torch.int32),
        num_prompt_tokens=torch.tensor([len(row["prompt"]) for row in full], dtype=torch.int32),
        num_tokens=torch.tensor([len(row["prompt"]) + len(row["output"]) for row in full], dtype=torch.int32),
        bias_start=num_biases.cumsum(0).to(torch.int32),
        bias_ids=torch.tensor([i for row in full for i in row["bias"]], dtype=torch.int32),
        bias_values=torch.tensor([value for row in full for value in row["bias"].values()], dtype=torch.float32),
    )


@pytest.fixture(scope="session")
def sampling_batch() -> Callable[[list[dict[str, Any]]], SamplingBatch]:
    """sampling_batch([{temperature, top_k, ..., prompt, output, bias: {id: value}}, ...]) -> SamplingBatch."""
    return _make
