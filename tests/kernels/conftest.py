"""Fixtures that make sampling batches from short descriptions of rows, and random rows and logits."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels.sampling import DOUBLES, SamplingBatch, TokenMasks

_DEFAULTS = {
    **DOUBLES,
    "temperature": 1.0,
    "top_k": 0,
    "seed": 0,
    "position": 0,
    "top_logprobs": -1,
    "prompt": (),
    "output": (),
    "bias": {},
    "allowed": None,
    "forced": -1,
}


def _make(rows: list[dict[str, Any]]) -> SamplingBatch:
    full = [{**_DEFAULTS, **row} for row in rows]
    assert all(row.keys() == _DEFAULTS.keys() for row in full), "a row has an unknown field"

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] for row in full], dtype=dtype)

    # Histories are in another order than the rows, and followed by tokens that must not be read.
    max_len = max(len(row["prompt"]) + len(row["output"]) for row in full) + 2
    history = torch.ones(len(full), max_len, dtype=torch.int32)
    for i, row in enumerate(full):
        tokens = [*row["prompt"], *row["output"]]
        history[len(full) - 1 - i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    allowed = [row["allowed"] for row in full]
    forced_ids = column("forced", torch.int32)
    num_biases = torch.tensor([0, *(len(row["bias"]) for row in full)])
    return SamplingBatch(
        **{name: column(name, torch.float64) for name in DOUBLES},
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
        masks=None if allowed == [None] * len(full) else _masks(allowed),
        forced_ids=None if bool((forced_ids < 0).all()) else forced_ids,
    )


def _masks(allowed: list[Any]) -> TokenMasks:
    """Makes masks in another order than the rows, with an unused row, and ones beyond the vocabulary."""
    num_words = max((token_id // 32 for ids in allowed for token_id in ids or ()), default=0) + 1
    words = torch.full((len(allowed) + 1, num_words + 300), -1, dtype=torch.int32)
    rows = torch.full((len(allowed),), -1, dtype=torch.int32)
    for i, ids in enumerate(allowed):
        if ids is not None:
            bits = np.zeros(words.shape[1] * 32, dtype=np.uint8)
            bits[list(ids)] = 1
            rows[i] = len(allowed) - i
            words[rows[i]] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
    return TokenMasks(rows, words)


@pytest.fixture(scope="session")
def sampling_batch() -> Callable[[list[dict[str, Any]]], SamplingBatch]:
    """sampling_batch([{temperature, top_k, ..., prompt, output, bias: {id: value}, allowed: ids, forced}, ...])."""
    return _make


def _random_row(rng: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    choices: dict[str, Callable[[], Any]] = {
        "temperature": lambda: float(rng.choice([0.0, 0.2, 0.7, 1.5, 100.0])),
        "top_k": lambda: int(rng.choice([1, 2, 5, 50, vocab_size - 1, vocab_size, 2 * vocab_size])),
        "top_p": lambda: float(np.float32(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.99, 1.0]))),
        "min_p": lambda: float(np.float32(rng.choice([1e-4, 0.02, 0.5, 1.0]))),
        "repetition_penalty": lambda: float(np.float32(rng.choice([0.7, 1.2, 5.0]))),
        "presence_penalty": lambda: float(np.float32(rng.uniform(-2, 2))),
        "frequency_penalty": lambda: float(np.float32(rng.uniform(-2, 2))),
        "top_logprobs": lambda: int(rng.integers(0, 21)),
        "prompt": lambda: rng.integers(0, vocab_size, rng.integers(1, 40)).tolist(),
        "output": lambda: rng.integers(0, vocab_size, rng.integers(1, 40)).tolist(),
        "bias": lambda: {
            int(i): float(rng.choice([-math.inf, -100.0, 3.0])) for i in rng.integers(0, vocab_size, rng.integers(1, 9))
        },
    }
    row = {name: draw() for name, draw in choices.items() if rng.random() < 0.5}
    if rng.random() < 0.3:
        row["allowed"] = np.flatnonzero(rng.random(vocab_size) < rng.choice([0.01, 0.5, 0.99])).tolist()
    if rng.random() < 0.1:
        row["forced"] = int(rng.integers(vocab_size))
    return row | {"seed": int(rng.integers(2**64, dtype=np.uint64)), "position": int(rng.integers(5000))}


@pytest.fixture(scope="session")
def random_sampling_row() -> Callable[[np.random.Generator, int], dict[str, Any]]:
    """random_sampling_row(rng, vocab_size): a row in which each sampling feature is on with probability 1/2."""
    return _random_row


def _random_logits(rng: np.random.Generator, kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    logits = rng.standard_normal((num_rows, vocab_size)) * rng.choice([0.1, 1.0, 5.0, 30.0], (num_rows, 1))
    if kind == "ties":
        logits = np.round(logits)
    if kind == "forbidden":
        logits[rng.random(logits.shape) < 0.5] = -math.inf
    if kind == "flat":
        logits = np.zeros_like(logits)
    return torch.from_numpy(logits.astype(np.float32))


@pytest.fixture(scope="session")
def random_logits() -> Callable[[np.random.Generator, str, int, int], torch.Tensor]:
    """random_logits(rng, "normal" | "ties" | "forbidden" | "flat", num_rows, vocab_size) -> fp32."""
    return _random_logits
