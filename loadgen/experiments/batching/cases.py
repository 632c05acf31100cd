"""What is run: requests whose answers differ in length by design, or as in a production trace."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loadgen.errors import OptionError
from loadgen.trace.reader import read_trace
from loadgen.trace.schema import Accounting, Blocks, Trace
from loadgen.trace.window import at_rate, cut, fit, from_zero, limit, scale_lengths

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_TOKENS = 16
"""The engine's default block: what a prefix cache shares, it shares in these."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the synthetic cases are.

    Attributes:
        num_slots: slots of the engine (`--max-num-seqs`).
        prompt_tokens: of every prompt.
        shared_tokens: of these, how many all prompts begin with; a multiple of BLOCK_TOKENS.
        uniform: tokens of every answer of the uniform case.
        mixture: tokens of an answer of the mixture, a third of the requests each.
        batches: full batches of the uniform case and of the mixture.
        short, long: answers of the skewed case: in each full batch all but one are short.
        skewed_batches: full batches of the skewed case.
        trace_requests: most requests of the trace's window.
        sweep: tokens of an answer of the sweep, a third each.
        sweep_batches: full batches of the sweep, or more, up to `sweep_least` requests.
        sweep_slots: slots of the engines of the sweep.
    """

    num_slots: int = 64
    prompt_tokens: int = 32
    shared_tokens: int = 16
    uniform: int = 128
    mixture: tuple[int, ...] = (64, 256, 1024)
    batches: int = 3
    short: int = 16
    long: int = 1024
    skewed_batches: int = 20
    trace_requests: int = 320
    sweep: tuple[int, ...] = (8, 32, 128)
    sweep_batches: int = 4
    sweep_least: int = 64
    sweep_slots: tuple[int, ...] = (4, 8, 16, 32, 64, 128)

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer there is."""
        return max(self.uniform, *self.mixture, self.long, *self.sweep)

    def within(self, max_model_len: int) -> "Sizes":
        """The same with answers cut to what fits a model's context.

        Raises: OptionError: not even half of the answers would fit.
        """
        most = max_model_len - self.prompt_tokens
        if most < 2 * self.short:
            raise OptionError(f"the model's context of {max_model_len} tokens is too short for this experiment")
        return replace(
            self,
            uniform=min(self.uniform, most),
            mixture=tuple(min(tokens, most) for tokens in self.mixture),
            long=min(self.long, most),
            sweep=tuple(min(tokens, most) for tokens in self.sweep),
        )


QUICK = Sizes(
    num_slots=8,
    uniform=12,
    mixture=(4, 16, 64),
    batches=2,
    short=4,
    long=64,
    skewed_batches=4,
    trace_requests=24,
    sweep=(2, 8, 32),
    sweep_batches=2,
    sweep_least=12,
    sweep_slots=(4, 16),
)
"""So small that the figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload of the experiment.

    Attributes:
        key: one word.
        title: in reports.
        trace: its requests, arrivals from 0.
        is_queued: all requests are there before the first is admitted; else they arrive as the trace says.
    """

    key: str
    title: str
    trace: Trace
    is_queued: bool = True


def synthetic_cases(sizes: Sizes) -> list[Case]:
    """Uniform answers, the mixture, and one long answer among short ones in every full batch."""
    slots, rng = sizes.num_slots, np.random.default_rng(0)
    count = sizes.batches * slots
    uniform = np.full(count, sizes.uniform)
    mixture = rng.permutation(np.resize(sizes.mixture, count))
    skewed = np.full((sizes.skewed_batches, slots), sizes.short)
    middle = rng.integers(slots // 4, 3 * slots // 4, sizes.skewed_batches)  # neighbours may arrive in another order
    skewed[np.arange(sizes.skewed_batches), middle] = sizes.long
    return [
        Case("uniform", f"{count:,} answers of {sizes.uniform:,} tokens", _trace("uniform", sizes, uniform)),
        Case(
            "mixture",
            f"{count:,} answers of {_listed(sizes.mixture)} tokens, evenly mixed",
            _trace("mixture", sizes, mixture),
        ),
        Case(
            "skewed",
            f"{sizes.skewed_batches} times {slots - 1} answers of {sizes.short:,} tokens and one of {sizes.long:,}",
            _trace("skewed", sizes, skewed.ravel()),
        ),
    ]


def sweep_case(sizes: Sizes, num_slots: int) -> Case:
    """A smaller mixture, for engines of any number of slots."""
    count = max(sizes.sweep_least, sizes.sweep_batches * num_slots)
    outputs = np.random.default_rng(1).permutation(np.resize(sizes.sweep, count))
    title = f"{count:,} answers of {_listed(sizes.sweep)} tokens, evenly mixed"
    return Case("sweep", title, _trace("sweep", sizes, outputs))


def trace_window(
    path: Path, *, window_s: tuple[float, float], most: int, scale: float, max_model_len: int
) -> tuple[Trace, str]:
    """A window of a trace, fitted to the machine's model, and its description for reports.

    Args:
        path: any file that `read_trace` knows.
        window_s: contiguous, seconds of the trace.
        most: requests, the first ones of the window.
        scale: of prompts and answers alike.
        max_model_len: prompts and answers that are longer together are left out.
    Raises: TraceError, OptionError: see `read_trace` and the window's functions; OptionError if too little is left.
    """
    begin_s, end_s = window_s
    whole = limit(cut(read_trace(path), begin_s, end_s), most)
    trace = from_zero(fit(scale_lengths(whole, scale), max_model_len, "drop"))
    if len(trace) < 2:
        raise OptionError(f"--trace {path}: {len(trace)} requests are left of its seconds {begin_s:g} to {end_s:g}")
    title = f"{len(trace):,} requests of {trace.name} from second {begin_s:g} on, lengths times {scale:g}"
    if left_out := len(whole) - len(trace):
        title += f", {left_out} longer than {max_model_len:,} tokens left out"
    return trace, title


def queued_case(trace: Trace, title: str) -> Case:
    """The requests of a trace, all at once: what its lengths alone do."""
    return Case("trace", f"{title}, all at once", replace(trace, arrival_s=np.zeros(len(trace))))


def paced_case(trace: Trace, title: str, rate: float) -> Case:
    """The requests of a trace as they arrived, its clock set so that `rate` come per second."""
    return Case("paced", f"{title}, its arrivals at {rate:.3g} per second", at_rate(trace, rate), is_queued=False)


def _listed(lengths: Sequence[int]) -> str:
    return "/".join(f"{tokens:,}" for tokens in lengths)


def _trace(key: str, sizes: Sizes, outputs: "NDArray[np.int64]") -> Trace:
    """Requests that are all due at 0; their prompts begin alike and go on each in its own way."""
    count = len(outputs)
    shared = sizes.shared_tokens // BLOCK_TOKENS
    per_prompt = -(-sizes.prompt_tokens // BLOCK_TOKENS)
    ids = np.empty((count, per_prompt), dtype=np.int64)
    ids[:, :shared] = np.arange(shared)
    ids[:, shared:] = shared + np.arange(count * (per_prompt - shared)).reshape(count, -1)
    return Trace(
        name=key,
        format="synthetic",
        digest=hashlib.sha256(f"batching/{key}".encode()).hexdigest(),
        arrival_s=np.zeros(count),
        input_tokens=np.full(count, sizes.prompt_tokens, dtype=np.int64),
        output_tokens=outputs.astype(np.int64),
        rows=np.arange(count, dtype=np.int64),
        accounting=Accounting(count),
        blocks=Blocks(ids.ravel(), np.arange(count + 1, dtype=np.int64) * per_prompt, BLOCK_TOKENS),
    )


def prompts_of(trace: Trace, vocab_size: int) -> list[tuple[int, ...]]:
    """Returns the same prompts in every call, with token ids from 1 on; prompts that share blocks begin alike.

    Args:
        trace: only its lengths, its blocks and its digest count.
        vocab_size: of the model.
    """
    key = int(trace.digest[:16], 16)
    prompts = []
    for index, length in enumerate(trace.input_tokens.tolist()):
        blocks, size = (
            ([index], length) if trace.blocks is None else (trace.blocks.of(index), trace.blocks.block_tokens)
        )
        parts = [np.random.default_rng([key, int(block)]).integers(1, vocab_size, size) for block in blocks]
        prompts.append(tuple(np.concatenate(parts)[:length].tolist()))
    return prompts
