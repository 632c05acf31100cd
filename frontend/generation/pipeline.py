"""The request pipeline behind all APIs: check, admit, tokenize, submit, and clean up."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from chairlift.service.sampling_fields import DEFAULT_MAX_TOKENS
from chairlift.service.service_classes import ServiceClass
from chairlift.service.structured.output_constraint import ConstraintKind, OutputConstraint
from chairlift.v1 import generation_service_pb2 as pb
from frontend.access.caller import current_caller
from frontend.errors import ClientStalled, DeadlineExceeded, QueueFull, RequestError, TargetsInfeasible
from frontend.generation.admission import Admission, Permit
from frontend.generation.answer.answer import Answer
from frontend.generation.answer.group import AnswerGroup
from frontend.generation.answer.parts import AnswerParsing
from frontend.generation.answer.prompt_echo import PromptEcho
from frontend.generation.deadline import Deadline
from frontend.generation.feasibility import ExpectedToken, Feasibility
from frontend.generation.prompt_size import PromptSize
from frontend.generation.turn_limiter import TurnLimiter
from frontend.observability.metrics import Metrics
from frontend.observability.request_events import RequestEvents
from frontend.observability.request_log import RequestLogLine
from frontend.observability.request_meter import RequestMeter
from frontend.observability.request_trace import RequestTrace, Spans
from frontend.observability.request_watch import RequestWatch
from frontend.observability.target_meter import TargetMeter
from frontend.observability.target_metrics import TargetOutcome
from frontend.observability.trace_context import current_origin
from frontend.request import convert
from frontend.request.constraints import constraints_of
from frontend.request.latency_targets import latency_targets
from frontend.request.prompt_options import PromptOptions
from frontend.request.request import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    nth_answer,
)
from frontend.request.token_prompt import token_prompt
from frontend.routing import wire
from frontend.routing.pending import PendingRequest
from frontend.routing.router import Router
from frontend.routing.stream import CancelReason, RequestStream
from frontend.slices import in_slices
from frontend.text.chat import ChatFormat, chat_format
from frontend.text.chat_renderer import ChatRenderer
from frontend.text.detokenizer import NO_MARKS
from frontend.text.served_model import ServedModel
from frontend.text.structured.compiler import GrammarCompiler
from frontend.types import AnswerTimes

_ANSWERS_PER_TURN = 16
"""Answers that resume per iteration of the event loop: 6 ms of work if all of them start and end in it."""


_NO_PROMPT_OPTIONS = PromptOptions()


class GenerationPipeline:
    """Runs generations on the connected engines.

    Args:
        engines: routes requests to engines.
        admission: limits the queue.
        metrics: counts requests, and what becomes of their targets.
        grammars: compiles output constraints to grammars.
        chats: renders conversations to prompts.
        classes: service classes by name; none: requests may still set targets.
        feasibility: refuses requests whose first token cannot be in time.
        token_window: tokens that the engine may generate ahead of a slow reader (backpressure).
        coalesce: whether tokens that are ready together are sent in one message.
        tool_call_parser, reasoning_parser: names of the parsers of chat answers.
        spans: exports traces; None: tracing is off.
        log_requests: whether each request is logged.
        log_prompts: whether the log line has the beginning of the prompt.
    """

    def __init__(
        self,
        engines: Router,
        admission: Admission,
        metrics: Metrics,
        grammars: GrammarCompiler,
        chats: ChatRenderer,
        *,
        classes: Mapping[str, ServiceClass],
        feasibility: Feasibility,
        token_window: int,
        coalesce: bool = True,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        spans: Spans | None = None,
        log_requests: bool = False,
        log_prompts: bool = False,
    ) -> None:
        self._log_requests = log_requests
        self._log_prompts = log_prompts
        self._turn_limiter = TurnLimiter(_ANSWERS_PER_TURN)
        self._spans = spans
        self._engines = engines
        self._admission = admission
        self._metrics = metrics.requests
        self._target_metrics = metrics.targets
        self._classes = classes
        self._feasibility = feasibility
        self._grammars = grammars
        self._chats = chats
        self._token_window = token_window
        self._coalesce = coalesce
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser

    def model(self, name: str) -> ServedModel:
        """Returns the served model, or the adapter of it, that has a name; an empty one is the model's.

        Raises:
            EngineUnavailable: no engine is connected.
            ModelNotFound: the model has another name.
        """
        return convert.named_model(name, self._engines.attachment().model)

    def check_capacity(self) -> None:
        """Refuses a request before it is read, while the queue is full. The request is counted, but neither logged nor
        traced.

        Raises:
            QueueFull: the queue is full.
        """
        try:
            self._admission.check_capacity(time.monotonic())
        except QueueFull:
            self._count_shed(1)
            raise

    def _count_shed(self, num_requests: int) -> None:
        """Counts requests that get no place, for the engine to which they would have gone."""
        if self._engines.serving:
            attachment = self._engines.attachment()
            self._metrics.shed(attachment.model.name, attachment.engine, num_requests)

    def chat_format(self, model: ServedModel) -> ChatFormat:
        """Returns the format of reasoning and tool calls in the model's answers."""
        return chat_format(model.tokenizer.chat.shown, tools=self._tool_call_parser, reasoning=self._reasoning_parser)

    @asynccontextmanager
    async def open(
        self,
        spec: pb.GenerationSpec,
        deadline: Deadline,
        *,
        chat: ChatPrompt | None = None,
        constraint: OutputConstraint | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        prompt_options: PromptOptions = _NO_PROMPT_OPTIONS,
        streamed: bool = True,
        permits: Sequence[Permit] = (),
    ) -> AsyncIterator[AnswerGroup]:
        """Starts a generation. Leaving the context cancels it, in the engine too, and returns its permits.

        Args:
            spec: as received.
            deadline: of the call.
            chat: the prompt, if the spec cannot express it; the spec then has none.
            constraint: the output constraint, likewise.
            default_max_tokens: max_tokens of a spec that sets none; the context length applies too.
            prompt_options: options of tokenization.
            streamed: whether the client gets messages as they arrive, not only the complete answer.
            permits: permits of the answers, if they were reserved; released here.

        Raises:
            RequestError: any; everything has been cleaned up.
        """
        observers = self._observers(spec, is_chat=chat is not None or spec.HasField("chat"))
        with RequestWatch(observers, deadline.passed, streamed=streamed) as watch:
            attachment = self._engines.attachment()
            model = convert.named_model(spec.model, attachment.model)
            prompt: Prompt | None = chat
            room = convert.num_output_tokens(spec.stop, model, default_max_tokens)
            truncation = prompt_options.truncation(model, room)
            if prompt is None:
                prompt = await in_slices(token_prompt(spec, model, truncation))
            targets = latency_targets(spec, self._classes, current_caller())
            if targets is not None:
                watch.add(TargetMeter(self._target_metrics, targets))
                self._feasibility.check_possible(targets)
            request = convert.generation_request(
                spec, model, prompt, constraint, truncated=truncation is not None, targets=targets
            )
            parsing = self._parsing(request, model)
            accepted_at_s = time.monotonic()
            watch.accept(
                request.request_id,
                request.num_answers,
                model.name,
                attachment.engine,
                partial(_prompt_text, request.prompt),
                now_s=accepted_at_s,
            )
            size = PromptSize.of(request.prompt)
            num_tokens = size.plain_tokens
            if truncation is not None:
                num_tokens = min(num_tokens, truncation.max_tokens)
            if isinstance(request.prompt, TokenPrompt):
                self._admission.check_fits(request.num_answers, num_tokens)
            is_reserved = bool(permits)
            if not permits:
                (permits,) = self._admission.admit_call([num_tokens], request.num_answers, accepted_at_s)
            expected: ExpectedToken | None = None
            streams: dict[int, RequestStream] = {}  # of the answers
            answers: AnswerGroup | None = None
            reason = CancelReason.CLIENT
            try:
                if targets is not None and targets.ttft_s is not None and not is_reserved:
                    expected = self._feasibility.expect(
                        targets, model.name, size, accepted_at_s=accepted_at_s, now_s=time.monotonic()
                    )
                began_at_s = time.monotonic()
                prompt_ids = await tokenize(
                    request.prompt, model, "spec.", self._chats, add_special_tokens=prompt_options.add_special_tokens
                )
                if truncation is not None:
                    prompt_ids = truncation.of(prompt_ids)
                tokenized_s = time.monotonic() - began_at_s
                limited = convert.with_token_budget(request, len(prompt_ids), model, default_max_tokens)
                self._admission.check_fits(request.num_answers, len(prompt_ids))
                permits[0].correct(len(prompt_ids), time.monotonic())
                if expected is not None:
                    self._feasibility.correct(expected, len(prompt_ids), time.monotonic())
                before = ""
                if parsing is not None and request.constraint is not None:
                    before = parsing.before_constraint(
                        prompt_ids, with_calls=request.constraint.kind is ConstraintKind.PARTS
                    )
                constraints = await constraints_of(request, model, self._grammars, before=before)
                echo = await _echo(request, prompt_ids, model)

                def first_token(index: int) -> None:
                    now_s = time.monotonic()
                    permits[index].release(now_s, served=True)
                    if expected is not None and not index:
                        self._feasibility.arrived(expected, streams[index].num_cached_tokens, now_s)

                def submit(index: int) -> Answer:
                    answer_request = nth_answer(limited, index)
                    submitted_at_s = time.monotonic()
                    remaining_s = _checked_remaining_s(deadline.remaining_s())
                    submission = wire.submission(
                        answer_request,
                        prompt_ids,
                        remaining_s=remaining_s,
                        elapsed_s=submitted_at_s - accepted_at_s,
                        constraints=constraints,
                    )
                    pending = PendingRequest(
                        submission,
                        model.key,
                        window=self._token_window,
                        coalesce=self._coalesce,
                        now_s=submitted_at_s,
                        on_first_token=lambda: first_token(index),
                        on_account=None if index else watch.account,
                    )
                    engine = self._engines.submit(pending)
                    stream = streams[index] = pending.stream
                    if not index:
                        if expected is not None:
                            self._feasibility.forget(expected)
                        watch.submit(max_tokens=limited.stop.max_tokens or 0, engine=engine, now_s=submitted_at_s)
                    return Answer(
                        answer_request,
                        model,
                        stream,
                        prompt_ids=prompt_ids,
                        times=AnswerTimes(
                            accepted_at_s=accepted_at_s, tokenized_s=tokenized_s, submitted_at_s=submitted_at_s
                        ),
                        index=index,
                        prompt=None if index else echo,
                        parser=None if parsing is None else parsing.parser(prompt_ids),
                        marks=NO_MARKS if parsing is None else parsing.marks,
                        turn_limiter=self._turn_limiter,
                    )

                answers = AnswerGroup(request.num_answers, submit, watch)
                yield answers
            except TargetsInfeasible as error:
                if expected is None or not streams:
                    raise
                raise self._feasibility.refusal(expected, error.message, time.monotonic()) from error
            except ClientStalled:
                reason = CancelReason.STALLED
                raise
            except asyncio.CancelledError:
                if deadline.passed():
                    reason = CancelReason.DEADLINE
                raise
            finally:
                if expected is not None:
                    self._feasibility.forget(expected)
                for permit in permits:
                    permit.release(time.monotonic())
                if answers is not None:
                    answers.close()
                for stream in streams.values():
                    stream.close(reason)

    @contextmanager
    def reserve(self, specs: Sequence[pb.GenerationSpec]) -> Iterator[list[list[Permit]]]:
        """Reserves permits for all requests of one call, or for none; yields a list for each. Releases what is left.

        Args:
            specs: as received, each with its prompt.

        Raises:
            InvalidRequest: they exceed the size of the queue.
            QueueFull: see `Admission.admit_call`.
            TargetsInfeasible: their first tokens together cannot be in time.
        """
        num_answers = specs[0].num_answers if specs[0].HasField("num_answers") else 1
        permits_by_spec: list[list[Permit]] = []
        try:
            try:
                permits_by_spec = self._admission.admit_call(
                    [PromptSize.of_specs([spec]).plain_tokens for spec in specs], num_answers, time.monotonic()
                )
                self._expect_all(specs)  # last, because it uses up a retry ticket
            except (QueueFull, TargetsInfeasible):
                self._count_shed(len(specs))
                raise
            except RequestError as error:
                self._metrics.refuse(error, len(specs))
                raise
            yield permits_by_spec
        finally:
            for permits in permits_by_spec:
                for permit in permits:
                    permit.release(time.monotonic())

    def _expect_all(self, specs: Sequence[pb.GenerationSpec]) -> None:
        """Checks the prompts of one call as if they were one: they have the same targets, and one retry ticket."""
        targets = latency_targets(specs[0], self._classes, current_caller())
        if targets is None or targets.ttft_s is None:
            return
        model = self.model(specs[0].model)
        size = PromptSize.of_specs(specs)
        now_s = time.monotonic()
        try:
            expected = self._feasibility.expect(targets, model.name, size, accepted_at_s=now_s, now_s=now_s)
        except TargetsInfeasible:
            self._target_metrics.note_outcome(targets.service_class, TargetOutcome.REFUSED)
            raise
        self._feasibility.forget(expected)

    def _parsing(self, request: GenerationRequest, model: ServedModel) -> AnswerParsing | None:
        if not request.output.parse or not isinstance(request.prompt, ChatPrompt):
            return None
        return AnswerParsing(request.prompt, self.chat_format(model), model.tokenizer)

    def _observers(self, spec: pb.GenerationSpec, *, is_chat: bool) -> list[RequestEvents]:
        observers: list[RequestEvents] = [RequestMeter(self._metrics), self._metrics.traffic]
        if self._spans is not None:
            observers.append(RequestTrace(self._spans, current_origin(), spec, is_chat=is_chat))
        if self._log_requests:
            observers.append(RequestLogLine(current_origin(), spec, with_prompt=self._log_prompts))
        return observers

    async def count_tokens(
        self,
        request: pb.CountTokensRequest,
        chat: ChatPrompt | None = None,
        *,
        add_special_tokens: bool | None = None,
    ) -> Sequence[int]:
        """Returns the token ids of a prompt; holds a permit while it is tokenized.

        Args:
            request: as received.
            chat: the prompt, if the request cannot express it; the request then has none.
            add_special_tokens: see `PromptOptions`.

        Raises:
            RequestError: any.
        """
        model = self.model(request.model)
        if chat is not None:
            convert.check_chat(chat, model, "chat.messages")
        prompt = chat or convert.prompt(request, model, "")
        permit = self._admission.admit(PromptSize.of(prompt).plain_tokens, time.monotonic())
        try:
            return await tokenize(prompt, model, "", self._chats, add_special_tokens=add_special_tokens)
        finally:
            permit.release(time.monotonic())


async def _echo(request: GenerationRequest, prompt_ids: Sequence[int], model: ServedModel) -> PromptEcho | None:
    if not request.output.echo and request.output.prompt_logprobs is None:
        return None
    # In a thread: the text of 100,000 tokens takes 0.1 s.
    return await asyncio.to_thread(PromptEcho, request.output, prompt_ids, model.tokenizer)


async def tokenize(
    prompt: Prompt, model: ServedModel, path: str, chats: ChatRenderer, *, add_special_tokens: bool | None = None
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


def _prompt_text(prompt: Prompt) -> str:
    """Returns a prompt as the request log shows it."""
    match prompt:
        case TextPrompt(text):
            return text
        case ChatPrompt(messages):
            return "\n".join(f"{message.role}: {''.join(message.content)}" for message in messages)
        case TokenPrompt(token_ids):
            return str(list(token_ids))


def _checked_remaining_s(remaining_s: float | None) -> float | None:
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request reached the engine")
    return remaining_s
