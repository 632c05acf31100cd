"""One generation from its admission to its end: tokenizes the prompt, submits the answers to engines, and cleans up."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from chairlift.service.structured.output_constraint import ConstraintKind
from frontend.errors import DeadlineExceeded, TargetsInfeasible
from frontend.generation.admission import Admission, Permit
from frontend.generation.answer.answer import Answer
from frontend.generation.answer.group import AnswerGroup
from frontend.generation.answer.parts import AnswerParsing
from frontend.generation.answer.prompt_echo import PromptEcho
from frontend.generation.deadline import Deadline
from frontend.generation.feasibility import ExpectedToken, Feasibility
from frontend.generation.prompt_size import PromptSize
from frontend.generation.turn_limiter import TurnLimiter
from frontend.observability.request_watch import RequestWatch
from frontend.request import convert
from frontend.request.constraints import Constraints, constraints_of
from frontend.request.prompt_options import Truncation
from frontend.request.request import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    RequestExtras,
    TextPrompt,
    TokenPrompt,
    nth_answer,
)
from frontend.routing import wire
from frontend.routing.pending import PendingRequest
from frontend.routing.router import Router
from frontend.routing.stream import CancelReason, RequestStream
from frontend.text.chat_renderer import ChatRenderer
from frontend.text.detokenizer import NO_MARKS
from frontend.text.served_model import ServedModel
from frontend.text.structured.compiler import GrammarCompiler
from frontend.types import AnswerTimes

_ANSWERS_PER_TURN = 16
"""Answers that resume per iteration of the event loop: 6 ms of work if all of them start and end in it."""


@dataclass(frozen=True, slots=True)
class Services:
    """What all generations run on.

    Attributes:
        engines: routes requests to engines.
        admission: limits the queue.
        feasibility: refuses requests whose first token cannot be in time.
        grammars: compiles output constraints to grammars.
        chats: renders conversations to prompts.
        token_window: tokens that the engine may generate ahead of a slow reader (backpressure).
        coalesce: whether tokens that are ready together are sent in one message.
    """

    engines: Router
    admission: Admission
    feasibility: Feasibility
    grammars: GrammarCompiler
    chats: ChatRenderer
    token_window: int
    coalesce: bool
    turn_limiter: TurnLimiter = field(default_factory=lambda: TurnLimiter(_ANSWERS_PER_TURN))


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A checked request.

    Attributes:
        request: without its final max_tokens.
        extras: what its spec could not express.
        size: of the prompt, before it is tokenized.
        truncation: of the prompt; None: it is taken as it is.
        parsing: parses its answers; None: all is text.
        accepted_at_s: time.monotonic().
    """

    request: GenerationRequest
    extras: RequestExtras
    model: ServedModel
    size: PromptSize
    truncation: Truncation | None
    parsing: AnswerParsing | None
    accepted_at_s: float

    @property
    def num_tokens(self) -> int:
        """Estimate of the prompt's tokens."""
        num_tokens = self.size.plain_tokens
        return num_tokens if self.truncation is None else min(num_tokens, self.truncation.max_tokens)


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request that can be submitted; its max_tokens is final."""

    request: GenerationRequest
    prompt_ids: Sequence[int]
    constraints: Constraints
    echo: PromptEcho | None
    tokenized_s: float


class Generation:
    """A generation that has permits. `close` it, whatever happens.

    Args:
        services: what it runs on.
        accepted: the checked request.
        permits: one for each answer.
        deadline: of the call.
        watch: notified of the submission.
    """

    def __init__(
        self,
        services: Services,
        accepted: AcceptedRequest,
        permits: Sequence[Permit],
        deadline: Deadline,
        watch: RequestWatch,
    ) -> None:
        self._services = services
        self._accepted = accepted
        self._permits = permits
        self._deadline = deadline
        self._watch = watch
        self._expected: ExpectedToken | None = None  # if the first token has a target
        self._streams: dict[int, RequestStream] = {}  # of the answers
        self._answers: AnswerGroup | None = None

    def expect_first_token(self) -> None:
        """Predicts the first token of a request with a target for it.

        Raises:
            TargetsInfeasible: it cannot be in time.
        """
        accepted = self._accepted
        targets = accepted.request.targets
        if targets is not None and targets.ttft_s is not None:
            self._expected = self._services.feasibility.expect(
                targets,
                accepted.model.name,
                accepted.size,
                accepted_at_s=accepted.accepted_at_s,
                now_s=time.monotonic(),
            )

    async def start(self) -> AnswerGroup:
        """Tokenizes the prompt, compiles the constraints, and submits the first answer.

        Raises:
            RequestError: any.
        """
        prepared = await self._prepare()
        self._answers = AnswerGroup(prepared.request.num_answers, partial(self._submit, prepared), self._watch)
        return self._answers

    def refusal(self, error: TargetsInfeasible) -> TargetsInfeasible | None:
        """Returns an engine's refusal with the slot of a retry; None: the refusal was the frontend's own."""
        if self._expected is None or not self._streams:
            return None
        return self._services.feasibility.refusal(self._expected, error.message, time.monotonic())

    def close(self, reason: CancelReason) -> None:
        """Cancels what has not ended, in the engines too, and returns the permits."""
        if self._expected is not None:
            self._services.feasibility.forget(self._expected)
        for permit in self._permits:
            permit.release(time.monotonic())
        if self._answers is not None:
            self._answers.close()
        for stream in self._streams.values():
            stream.close(reason)

    async def _prepare(self) -> _PreparedRequest:
        services, accepted = self._services, self._accepted
        request, model, parsing = accepted.request, accepted.model, accepted.parsing
        began_at_s = time.monotonic()
        special = accepted.extras.prompt_options.add_special_tokens
        prompt_ids = await tokenize(request.prompt, model, "spec.", services.chats, add_special_tokens=special)
        if accepted.truncation is not None:
            prompt_ids = accepted.truncation.of(prompt_ids)
        tokenized_s = time.monotonic() - began_at_s
        limited = convert.with_token_budget(request, len(prompt_ids), model, accepted.extras.default_max_tokens)
        services.admission.check_fits(request.num_answers, len(prompt_ids))
        self._permits[0].correct(len(prompt_ids), time.monotonic())
        if self._expected is not None:
            services.feasibility.correct(self._expected, len(prompt_ids), time.monotonic())
        before = ""
        if parsing is not None and request.constraint is not None:
            before = parsing.before_constraint(prompt_ids, with_calls=request.constraint.kind is ConstraintKind.PARTS)
        constraints = await constraints_of(request, model, services.grammars, before=before)
        return _PreparedRequest(limited, prompt_ids, constraints, await _echo(request, prompt_ids, model), tokenized_s)

    def _submit(self, prepared: _PreparedRequest, index: int) -> Answer:
        services, accepted = self._services, self._accepted
        request = nth_answer(prepared.request, index)
        submitted_at_s = time.monotonic()
        submission = wire.submission(
            request,
            prepared.prompt_ids,
            remaining_s=_checked_remaining_s(self._deadline.remaining_s()),
            elapsed_s=submitted_at_s - accepted.accepted_at_s,
            constraints=prepared.constraints,
        )
        pending = PendingRequest(
            submission,
            accepted.model.key,
            window=services.token_window,
            coalesce=services.coalesce,
            now_s=submitted_at_s,
            on_first_token=partial(self._note_first_token, index),
            on_account=None if index else self._watch.account,
        )
        engine = services.engines.submit(pending)
        self._streams[index] = pending.stream
        if not index:
            if self._expected is not None:
                services.feasibility.forget(self._expected)
            self._watch.submit(max_tokens=request.stop.max_tokens or 0, engine=engine, now_s=submitted_at_s)
        parsing = accepted.parsing
        return Answer(
            request,
            accepted.model,
            pending.stream,
            prompt_ids=prepared.prompt_ids,
            times=AnswerTimes(
                accepted_at_s=accepted.accepted_at_s, tokenized_s=prepared.tokenized_s, submitted_at_s=submitted_at_s
            ),
            index=index,
            prompt=None if index else prepared.echo,
            parser=None if parsing is None else parsing.parser(prepared.prompt_ids),
            marks=NO_MARKS if parsing is None else parsing.marks,
            turn_limiter=services.turn_limiter,
        )

    def _note_first_token(self, index: int) -> None:
        now_s = time.monotonic()
        self._permits[index].release(now_s, served=True)
        if self._expected is not None and not index:
            self._services.feasibility.arrived(self._expected, self._streams[index].num_cached_tokens, now_s)


async def tokenize(
    prompt: Prompt, model: ServedModel, path: str, chats: ChatRenderer, *, add_special_tokens: bool | None
) -> Sequence[int]:
    """Returns the token ids of a checked prompt.

    Args:
        path: prefix of the prompt's field in errors, as in "spec.".
        add_special_tokens: see `PromptOptions`.

    Raises:
        InvalidRequest, ServerDraining: see `ChatRenderer.render`.
    """
    match prompt:
        case TextPrompt(text):
            return await model.tokenizer.encode(text, add_special_tokens=add_special_tokens is not False)
        case ChatPrompt(turns, options):
            rendered = await chats.render(model.tokenizer, turns, options, field=path + "chat")
            return await model.tokenizer.encode(rendered, add_special_tokens=bool(add_special_tokens))
        case TokenPrompt(token_ids):
            return token_ids


async def _echo(request: GenerationRequest, prompt_ids: Sequence[int], model: ServedModel) -> PromptEcho | None:
    if not request.output.echo and request.output.prompt_logprobs is None:
        return None
    # In a thread: the text of 100,000 tokens takes 0.1 s.
    return await asyncio.to_thread(PromptEcho, request.output, prompt_ids, model.tokenizer)


def _checked_remaining_s(remaining_s: float | None) -> float | None:
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request reached the engine")
    return remaining_s
