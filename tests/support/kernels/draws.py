"""Compares draws of a sampler with the exact distribution."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.reference.sample import kept_tokens


def distribution_error(tokens: npt.NDArray[np.int64], logits: torch.Tensor, filters: Mapping[str, Any]) -> float:
    """Returns how far draws are from the exact distribution: Pearson's chi-square as a value of a standard normal.

    Args:
        tokens: the draws, enough for more than 5 expected of each token that may be drawn.
        logits: [vocab_size] of every draw.
        filters: temperature, top_k, top_p and min_p, as far as they differ from sampling all tokens at temperature 1.
    Raises: AssertionError: a token was drawn that the filters exclude.
    """
    arguments = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | dict(filters)
    ids, d = kept_tokens(logits, **arguments)
    expected = np.zeros(len(logits))
    expected[ids.numpy()] = (d.exp() / d.exp().sum()).numpy() * len(tokens)
    counts = np.bincount(tokens, minlength=len(logits))
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert expected.min() > 5  # or chi-square would not apply
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # Wilson-Hilferty: (chi^2 / k)^(1/3) is nearly normal with mean 1 - 2/(9k) and variance 2/(9k).
    return float((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
