"""Prompts and output lengths, drawn from a seed: the same for every variant."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, in the order in which they are sent.

    Attributes:
        prompts: token ids; none is the end token 0.
        max_tokens: output tokens of each.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of all requests."""
        return sum(self.max_tokens)


def exponential_workload(
    num_requests: int, *, prompt_len: int, mean: float, cap: int, vocab_size: int, seed: int = 0
) -> Workload:
    """Prompts of one length and exponentially distributed output lengths, 1 to `cap`: the spread that makes static
    batches wait, see Orca (OSDI'22).
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.ceil(rng.exponential(mean, num_requests)), 1, cap).astype(int)
    prompts = rng.integers(1, vocab_size, (num_requests, prompt_len))
    return Workload(tuple(map(tuple, prompts.tolist())), tuple(lengths.tolist()))


def uniform_workload(
    num_requests: int, *, prompt_lens: tuple[int, int], output_lens: tuple[int, int], vocab_size: int, seed: int = 0
) -> Workload:
    """Prompt and output lengths drawn evenly from ranges, both ends included."""
    rng = np.random.default_rng(seed)
    prompt_len = rng.integers(prompt_lens[0], prompt_lens[1] + 1, num_requests)
    max_tokens = rng.integers(output_lens[0], output_lens[1] + 1, num_requests)
    prompts = tuple(tuple(rng.integers(1, vocab_size, length).tolist()) for length in prompt_len)
    return Workload(prompts, tuple(max_tokens.tolist()))


def mixed_workload(num_requests: int = 64, *, vocab_size: int, seed: int = 0) -> Workload:
    """What the peers are compared on: prompts of 16 to 512 tokens, log-normal around 100; outputs of 16, 64 and 256
    tokens, a half, 22 in 64 and the rest of them.
    """
    rng = np.random.default_rng(seed)
    prompt_len = np.clip(np.exp(rng.normal(np.log(100), 0.8, num_requests)), 16, 512).astype(int)
    num_short, num_middle = num_requests // 2, num_requests * 22 // 64
    lengths = [16] * num_short + [64] * num_middle + [256] * (num_requests - num_short - num_middle)
    max_tokens = tuple(rng.permutation(lengths).tolist())
    prompts = tuple(tuple(rng.integers(1, vocab_size, length).tolist()) for length in prompt_len)
    return Workload(prompts, max_tokens)


def shared_prefix_workload(
    num_requests: int, *, shared_len: int, own_len: int, output_len: int, vocab_size: int
) -> Workload:
    """Prompts that begin with the same tokens, as with one system prompt for all; `own_len` further tokens each."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, vocab_size, shared_len).tolist()
    prompts = tuple((*shared, *rng.integers(1, vocab_size, own_len).tolist()) for _ in range(num_requests))
    return Workload(prompts, (output_len,) * num_requests)
