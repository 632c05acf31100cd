"""Speculative decoding: rows of running requests carry drafts, which the model verifies in the same step.

Drafts only use what a step has left. There are none while a prompt is computed, a request waits to run, or blocks run
out. Otherwise they share the rest of the token budget and of the positions with logits (`max_num_seqs`). So they delay
no prompt and no admission, and cause no preemption.

A row with a draft of k tokens computes 1 + k tokens and draws as many. Draws up to the first that differs from its
draft are the answer, token by token as without drafts. The next row overwrites the slots of rejected drafts:
`num_computed_tokens` advances by the tokens that stand, and only those enter the prefix cache.
"""

from collections.abc import Sequence
from dataclasses import replace

from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.drafts import PromptLookup
from engine.core.lifecycle import charge_time, finish_reason
from engine.core.outputs import (
    ModelRunnerOutput,
    RequestCompletion,
    RequestOutput,
    ScheduledRow,
    SchedulerOutput,
    SchedulerStats,
)
from engine.core.plan import PlanBuilder
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler


class DraftScheduler(Scheduler):
    """A scheduler that adds drafts to the plans of its base class; see the module.

    With one step in flight only: the next draft starts from the tokens that this step draws.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        assert config.drafts is not None, "nothing says how to draft"
        self._limits = config.drafts
        self._lookups: dict[RequestId, PromptLookup] = {}  # of requests that have run without a prompt beside them
        self._has_room = False  # whether the plan being made may have drafts
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Plans the next step; see `Scheduler.schedule`."""
        plan = super().schedule(now_s)
        if not self._has_room or plan.new_requests or not plan.rows:
            return plan
        step, requests = self._in_flight[-1]
        drafts = self._propose(requests, self._config.max_num_batched_tokens - plan.num_tokens)
        if not any(drafts):
            return plan
        narrow: list[tuple[Request, ScheduledRow]] = []
        wide: list[tuple[Request, ScheduledRow]] = []
        kept: list[tuple[int, ...]] = []
        for request, row, draft in zip(requests, plan.rows, drafts, strict=True):
            wanted = row.num_computed_tokens + 1 + len(draft)
            new_block_ids = self._cache.allocate_slots(request, wanted) if self._may_allocate(request, wanted) else ()
            draft = draft[: request.num_slots - row.num_computed_tokens - 1]
            if not draft:
                narrow.append((request, row))
                continue
            row = row._replace(
                num_scheduled_tokens=1 + len(draft), new_block_ids=(*row.new_block_ids, *(new_block_ids or ()))
            )
            wide.append((request, row))
            kept.append(draft)
        self._in_flight[-1] = step, [request for request, _ in (*narrow, *wide)]
        return replace(
            plan,
            rows=tuple(row for _, row in (*narrow, *wide)),
            num_tokens=plan.num_tokens + sum(map(len, kept)),
            drafts=tuple(kept),
        )

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput, now_s: float) -> list[RequestOutput]:
        """Applies the result of the oldest step in flight; see `Scheduler.update`.

        Confirmed drafts become known tokens first. The base class then sees rows that computed them and drew one token.
        """
        if not plan.drafts:
            return super().update(plan, result, now_s)
        requests = self._in_flight[0][1]
        rows, token_ids = list(plan.rows), list(result.token_ids)
        confirmed: dict[RequestId, tuple[int, ...]] = {}
        first = len(rows) - len(plan.drafts)
        for index, (draft, tokens) in enumerate(zip(plan.drafts, result.draft_tokens, strict=True), first):
            request = requests[index]
            if request.is_finished or not tokens:
                continue
            self._learn(request, len(draft), len(tokens) - 1)
            num_confirmed = self._append(request, tokens[:-1], now_s)
            rows[index] = rows[index]._replace(num_scheduled_tokens=1 + num_confirmed)
            token_ids[index] = tokens[num_confirmed]
            confirmed[request.request_id] = tokens[:num_confirmed]
        plan, result = replace(plan, rows=tuple(rows)), replace(result, token_ids=tuple(token_ids))
        outputs = super().update(plan, result, now_s)
        return [_with_tokens(confirmed.get(output.request_id, ()), output) for output in outputs]

    def stats(self) -> SchedulerStats:
        """Current load and totals since start."""
        return replace(
            super().stats(),
            num_drafts_total=self._num_drafts,
            num_draft_tokens_total=self._num_draft_tokens,
            num_accepted_tokens_total=self._num_accepted_tokens,
        )

    def _schedule_prompts(self, batch: PlanBuilder, prompts: list[Request]) -> None:
        super()._schedule_prompts(batch, prompts)
        self._has_room = not prompts and batch.may_admit and self._waiting.head is None

    def _propose(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, ...]]:
        """Returns a draft for each request, together at most num_tokens tokens; an empty list if there is no room.

        Drafts that do not fit are cut to one common length. What is then left gives some one more token, in turns.
        """
        num_left = min(num_tokens, self._config.max_num_seqs - len(requests))
        if num_left <= 0:
            return []
        drafts = [self._propose_one(request) for request in requests]
        length = self._limits.num_speculative_tokens
        while (num_drafted := sum(min(length, len(draft)) for draft in drafts)) > num_left:
            length -= 1
        num_left -= num_drafted
        cut = [index for index, draft in enumerate(drafts) if len(draft) > length]
        first = self._step * num_left % len(cut) if cut else 0
        longer = {*(cut[first:] + cut[:first])[:num_left]}
        return [draft[: length + (index in longer)] for index, draft in enumerate(drafts)]

    def _propose_one(self, request: Request) -> tuple[int, ...]:
        """Returns a draft that ends before the last token that a request may generate now; often none."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            if not _may_have_drafts(request):
                return ()
            lookup = self._lookups[request.request_id] = PromptLookup(self._limits)
        num_allowed = request.max_num_tokens - request.num_tokens
        if request.token_credit is not None:
            num_allowed = min(num_allowed, request.token_credit)
        return lookup.propose(request, num_allowed - 1)

    def _may_allocate(self, request: Request, num_tokens: int) -> bool:
        """Whether `num_tokens` need new blocks, and every running request could still get its next block afterwards."""
        if num_tokens <= request.num_slots:
            return False
        num_missing = self._cache.num_missing_blocks(request, num_tokens)
        return num_missing + len(self._running) * self._config.cache_groups.num_groups <= 0

    def _learn(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        self._num_accepted_tokens += num_accepted
        lookup = self._lookups[request.request_id]
        lookup.learn(num_drafts, num_accepted, request.num_tokens + num_accepted + 1)

    def _append(self, request: Request, token_ids: Sequence[int], now_s: float) -> int:
        """Appends confirmed drafts that do not end the answer; returns their number."""
        num_appended = 0
        for token_id in token_ids:
            request.output_ids.append(token_id)
            if finish_reason(request, self._config.end_token_ids) is not None:
                request.output_ids.pop()
                break
            num_appended += 1
        request.num_computed_tokens += num_appended
        self._totals.num_generated_tokens += num_appended
        if (credit := request.token_credit) is not None:
            if credit <= num_appended:  # it became limited after the step was planned: it is paused from now on
                charge_time(request, now_s)
                request.has_time_news = True
            request.token_credit = credit - num_appended
        return num_appended

    def _finish(self, request: Request, reason: EndReason, detail: str = "") -> RequestCompletion:
        self._lookups.pop(request.request_id, None)
        return super()._finish(request, reason, detail)


def _may_have_drafts(request: Request) -> bool:
    """Whether drafts can be verified: a drawn token depends on earlier ones only through their keys and values.

    Penalties and masks read the earlier tokens themselves. Log-probabilities are reported for one token per step.
    """
    params = request.params
    has_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
    return request.constraint is None and params.top_logprobs is None and not has_penalty


def _with_tokens(token_ids: tuple[int, ...], output: RequestOutput) -> RequestOutput:
    """Puts confirmed drafts in front of the token of an output."""
    if not token_ids or not output.token_ids:
        return output
    return output._replace(start_index=output.start_index - len(token_ids), token_ids=(*token_ids, *output.token_ids))
