"""Collects the answers of a scheduler, and drives one with a fake model until nothing is left to do."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.outputs import RequestCompletion, RequestOutput, SchedulerOutput, TokenLogprobs
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from tests.support.engine.fake_model import FakeModelRunner, OracleViolation


@dataclass(slots=True)
class Answer:
    """What came out for one request so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_owed_logprobs: int = 0  # of the prompt
    num_cached_tokens: int | None = None
    completion: RequestCompletion | None = None


class AnswerLedger:
    """Collects outputs and holds them to the contract: no gap, nothing twice, one completion, and that last."""

    def __init__(self) -> None:
        self.answers: dict[RequestId, Answer] = {}

    def expect(self, request: Request) -> None:
        """Opens the account of an accepted request."""
        self.answers[request.request_id] = Answer(
            token_ids=list(request.output_ids), num_owed_logprobs=request.num_owed_logits
        )

    def record(self, outputs: Sequence[RequestOutput]) -> None:
        """Books the outputs of one update.

        Raises: OracleViolation: an output breaks the contract.
        """
        for output in outputs:
            answer = self.answers.get(output.request_id)
            what = f"request {output.request_id}"
            if answer is None:
                raise OracleViolation(f"{what} was never accepted")
            if answer.completion is not None:
                raise OracleViolation(f"{what} has more to say after its completion: {output}")
            if output.start_index != len(answer.token_ids):
                raise OracleViolation(f"{what} continues at {output.start_index}, {len(answer.token_ids)} are here")
            if not output.token_ids and output.completion is None and output.prompt_logprobs is None:
                raise OracleViolation(f"{what} has an output without news")
            if output.prompt_logprobs is not None:
                start_index, tokens = output.prompt_logprobs
                if start_index != 1 + len(answer.prompt_logprobs) or not 0 < len(tokens) <= answer.num_owed_logprobs:
                    raise OracleViolation(f"{what} has logprobs of {len(tokens)} prompt tokens from {start_index} on")
                answer.prompt_logprobs += tokens
                answer.num_owed_logprobs -= len(tokens)
            if output.token_ids and answer.num_owed_logprobs:
                raise OracleViolation(f"{what} has a token before {answer.num_owed_logprobs} logprobs of its prompt")
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            if output.num_cached_tokens is not None:
                if answer.num_cached_tokens is not None:
                    raise OracleViolation(f"{what} has two first tokens")
                answer.num_cached_tokens = output.num_cached_tokens
            answer.completion = output.completion
            if answer.completion is not None and answer.completion.num_output_tokens != len(answer.token_ids):
                raise OracleViolation(
                    f"{what} ends with {len(answer.token_ids)} tokens, says {answer.completion.num_output_tokens}"
                )


def drive(
    scheduler: Scheduler,
    runner: FakeModelRunner,
    requests: Sequence[Request],
    *,
    max_steps_in_flight: int = 1,
    max_steps: int = 100_000,
) -> dict[RequestId, Answer]:
    """Submits requests and steps until nothing is left to do; each step takes one second of a made-up clock.

    Returns: the answers, in the order of `requests`.
    Raises: OracleViolation: something went wrong, or work is left after `max_steps`.
    """
    ledger = AnswerLedger()
    for request in requests:
        scheduler.add_request(request)
        ledger.expect(request)
    plans: deque[SchedulerOutput] = deque()
    now_s = 0.0
    for _ in range(max_steps):
        now_s += 1.0
        if scheduler.has_work():
            plans.append(scheduler.schedule(now_s))
            runner.launch(plans[-1])
        elif not plans:
            return ledger.answers
        if len(plans) == max_steps_in_flight or not scheduler.has_work():
            ledger.record(scheduler.update(plans.popleft(), runner.collect(), now_s))
    raise OracleViolation(f"work is left after {max_steps} steps")
