"""Scores given texts token by token through normal requests of the engine.

A token is scored by a request whose prompt is the text before it and whose only output is forced to that token by a
bias; the reported log-probability is from the raw logits. Short prefixes come first, so that longer ones find all but
their last block in the prefix cache: a text of n tokens costs about n times half a block, and each token attends to
cached keys and values as in any answer.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.fresh_scheduler import Scheduled, forget_requests, schedule_anew
from engine.core.outputs import TokenLogprobs
from engine.core.request import Request, RequestId, SamplingParams
from engine.interfaces import execute
from engine.serving.parts import EngineParts

# Far above any logit, and small enough for fp32 to keep the differences of biased logits.
_FORCE = 1e6
_request_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of all tokens, texts in order.

    Attributes:
        logprobs: `chosen` is the token's own; `top_ids` starts with the greedy token.
    """

    logprobs: tuple[TokenLogprobs, ...]

    @property
    def loss(self) -> float:
        """Mean cross entropy in nats per token."""
        return -math.fsum(score.chosen for score in self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)


def score_texts(parts: EngineParts, texts: Sequence[Sequence[int]], *, num_top: int = 1, every: int = 1) -> Scores:
    """Scores the tokens of texts after their first.

    Args:
        parts: the engine.
        texts: token ids.
        num_top: number of alternatives to report.
        every: score every n-th token only.
    Raises: BenchmarkError: a token could not be scored.
    """
    positions = [(index, at) for index, text in enumerate(texts) for at in range(1, len(text), every)]
    found: dict[tuple[int, int], TokenLogprobs] = {}
    asked: dict[RequestId, tuple[int, int]] = {}
    pending = deque(sorted(positions, key=lambda position: position[1]))
    scheduled = schedule_anew(parts, enable_prefix_caching=True)
    scheduler = scheduled.scheduler
    while pending or scheduler.has_work():
        num_wanted = 2 * parts.info.max_num_seqs - scheduler.stats().num_waiting
        while pending and num_wanted > 0:
            index, at = pending.popleft()
            request_id = RequestId(next(_request_ids))
            asked[request_id] = (index, at)
            scheduler.add_request(_request(request_id, texts[index], at, num_top))
            num_wanted -= 1
        _step(scheduled, asked, found)
    forget_requests(scheduled)
    return Scores(tuple(found[position] for position in positions))


def _request(request_id: RequestId, text: Sequence[int], at: int, num_top: int) -> Request:
    params = SamplingParams(
        seed=0,
        max_tokens=1,
        temperature=0.0,
        ignore_end_token=True,
        top_logprobs=num_top,
        logit_bias=((text[at], _FORCE),),
    )
    return Request(request_id, tuple(text[:at]), params, arrival_s=0.0)


def _step(
    scheduled: Scheduled, asked: dict[RequestId, tuple[int, int]], found: dict[tuple[int, int], TokenLogprobs]
) -> None:
    plan = scheduled.scheduler.schedule(time.perf_counter())
    result = execute(scheduled.runner, plan)
    for output in scheduled.scheduler.update(plan, result, time.perf_counter()):
        if not output.logprobs:
            detail = output.completion.detail if output.completion is not None else ""
            raise BenchmarkError(f"request {output.request_id} returned no token: {detail}")
        found[asked.pop(output.request_id)] = output.logprobs[0]
