"""What a request computes, bit by bit, whatever rides along: how tests of batch invariance record and compare it.

A `LogitsRecorder` listens where the runner hands logits to the sampler, so that it sees every output position once and
before any rule of sampling can hide a difference. It knows requests by their seeds: each has one of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.core.outputs import SchedulerOutput
from engine.core.request import Request, RequestId
from engine.interfaces import execute
from engine.serving.parts import EngineParts
from kernels.sampling import SampledTokens, SamplingBatch
from tests.support.engine.answer_ledger import Answer, AnswerLedger

Position = tuple[int, int]
"""Seed of a request, and index in its output."""

Sample = Callable[[torch.Tensor, SamplingBatch], SampledTokens]


class LogitsRecorder:
    """Keeps the bits of every row of logits that is sampled.

    Attributes:
        bits: [vocab_size] int32 of each position: the logits' own bits, so that NaN equals itself and -0 is not 0.
    """

    def __init__(self) -> None:
        self.bits: dict[Position, torch.Tensor] = {}

    def listen(self, sample: Sample) -> Sample:
        """`KernelOps.sample` that records what it is given.

        Raises: AssertionError: when called, if a position is sampled twice: two requests share a seed, or the scheduler
            has lost a token.
        """

        def recorded(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
            copies = logits.clone().view(torch.int32)  # the runner may use its buffer again
            for position, bits in zip(
                zip(batch.seed.tolist(), batch.position.tolist(), strict=True), copies, strict=True
            ):
                assert position not in self.bits, f"output {position[1]} of seed {position[0]} is sampled again"
                self.bits[position] = bits
            return sample(logits, batch)

        return recorded

    def take(self) -> dict[Position, torch.Tensor]:
        """What was recorded since the last call."""
        bits, self.bits = self.bits, {}
        return bits


@dataclass(frozen=True, slots=True)
class Served:
    """What a run of requests yielded.

    Attributes:
        answers: one per request, in their order; earlier output of a continued request comes first in its tokens.
        plans: of every step.
        num_preemptions, num_cached_tokens: of this run, so that a test knows it has seen them happen.
    """

    answers: tuple[Answer, ...]
    plans: tuple[SchedulerOutput, ...]
    num_preemptions: int
    num_cached_tokens: int


def serve(parts: EngineParts, requests: Sequence[Request], arrival_steps: Sequence[int]) -> Served:
    """Steps an engine until all requests have ended.

    Args:
        parts: the engine; it may have served before.
        requests: ids that this engine has not seen yet.
        arrival_steps: when each request arrives, in steps since the start. Steps in which nothing is there to be done
            pass at once.
    """
    scheduler, runner = parts.scheduler, parts.runner
    before = scheduler.stats()
    ledger = AnswerLedger()
    due = sorted(range(len(requests)), key=lambda index: arrival_steps[index], reverse=True)
    plans: list[SchedulerOutput] = []
    step = 0
    while due or scheduler.has_work():
        while due and (arrival_steps[due[-1]] <= step or not scheduler.has_work()):
            request = requests[due.pop()]
            scheduler.add_request(request)
            ledger.expect(request)
        plan = scheduler.schedule(float(step))
        ledger.record(scheduler.update(plan, execute(runner, plan), float(step)))
        plans.append(plan)
        step += 1
    after = scheduler.stats()
    answers = tuple(ledger.answers[RequestId(request.request_id)] for request in requests)
    assert all(answer.completion is not None for answer in answers)
    return Served(
        answers,
        tuple(plans),
        after.num_preemptions_total - before.num_preemptions_total,
        after.prefix_cache_hits_total - before.prefix_cache_hits_total,
    )


def assert_same_bits(got: Mapping[Position, torch.Tensor], want: Mapping[Position, torch.Tensor]) -> int:
    """Compares recorded logits position by position.

    Args:
        got: recorded now; may hold fewer positions than `want` if requests were continued.
        want: recorded before.
    Returns: how many positions were compared.

    Raises: AssertionError: says how many differ, which is the first, and by how much.
    """
    assert got.keys() <= want.keys(), f"{len(got.keys() - want.keys())} positions were never sampled before"
    differing = [position for position, bits in got.items() if not torch.equal(bits, want[position])]
    if differing:
        seed, index = first = min(differing, key=lambda position: position[1])
        a, b = (bits[first].view(torch.float32) for bits in (got, want))
        raise AssertionError(
            f"{len(differing)} of {len(got)} positions differ; the earliest is output {index} of seed {seed}: "
            f"{int((got[first] != want[first]).sum())} of {a.numel()} logits, by up to {float((a - b).abs().max()):.1e}"
        )
    return len(got)
