"""The request pipeline behind all APIs: check, admit, tokenize, submit, and clean up."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from chairlift.service.service_classes import ServiceClass
from chairlift.v1 import generation_service_pb2 as pb
from frontend.access.caller import current_caller
from frontend.errors import ClientStalled, QueueFull, RequestError, TargetsInfeasible
from frontend.generation.admission import Permit
from frontend.generation.answer.group import AnswerGroup
from frontend.generation.answer.parts import AnswerParsing
from frontend.generation.deadline import Deadline
from frontend.generation.generation import AcceptedRequest, Generation, Services, tokenize
from frontend.generation.prompt_size import PromptSize
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
from frontend.request.latency_targets import latency_targets
from frontend.request.request import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    RequestExtras,
    TextPrompt,
    TokenPrompt,
)
from frontend.request.token_prompt import token_prompt
from frontend.routing.stream import CancelReason
from frontend.slices import in_slices
from frontend.text.chat import ChatFormat, chat_format
from frontend.text.served_model import ServedModel
from frontend.types import LatencyTargets

_NO_EXTRAS = RequestExtras()


class GenerationPipeline:
    """Runs generations on the connected engines.

    Args:
        services: what generations run on.
        metrics: counts requests, and what becomes of their targets.
        classes: service classes by name; none: requests may still set targets.
        tool_call_parser, reasoning_parser: names of the parsers of chat answers.
        spans: exports traces; None: tracing is off.
        log_requests: whether each request is logged.
        log_prompts: whether the log line has the beginning of the prompt.
    """

    def __init__(
        self,
        services: Services,
        metrics: Metrics,
        *,
        classes: Mapping[str, ServiceClass],
        tool_call_parser: str,
        reasoning_parser: str,
        spans: Spans | None,
        log_requests: bool,
        log_prompts: bool,
    ) -> None:
        self._services = services
        self._metrics = metrics.requests
        self._target_metrics = metrics.targets
        self._classes = classes
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._spans = spans
        self._log_requests = log_requests
        self._log_prompts = log_prompts

    def model(self, name: str) -> ServedModel:
        """Returns the served model, or the adapter of it, that has a name; an empty one is the model's.

        Raises:
            EngineUnavailable: no engine is connected, or the one with this adapter is away.
            ModelNotFound: the model has another name.
        """
        return convert.named_model(name, self._services.engines.attachment(name).model)

    def check_capacity(self) -> None:
        """Refuses a request before it is read, while the queue is full. The request is counted, but neither logged nor
        traced.

        Raises:
            QueueFull: the queue is full.
        """
        try:
            self._services.admission.check_capacity(time.monotonic())
        except QueueFull:
            self._count_shed(1)
            raise

    def _count_shed(self, num_requests: int) -> None:
        """Counts requests that get no place, for the engine to which they would have gone."""
        if self._services.engines.serving:
            attachment = self._services.engines.attachment()
            self._metrics.shed(attachment.model.name, attachment.engine, num_requests)

    def chat_format(self, model: ServedModel) -> ChatFormat:
        """Returns the format of reasoning and tool calls in the model's answers."""
        return chat_format(model.tokenizer.chat.shown, tools=self._tool_call_parser, reasoning=self._reasoning_parser)

    @asynccontextmanager
    async def open(
        self,
        spec: pb.GenerationSpec,
        deadline: Deadline,
        extras: RequestExtras = _NO_EXTRAS,
        *,
        streamed: bool = True,
        permits: Sequence[Permit] = (),
    ) -> AsyncIterator[AnswerGroup]:
        """Starts a generation. Leaving the context cancels it, in the engine too, and returns its permits.

        Args:
            spec: as received.
            deadline: of the call.
            extras: what the spec cannot express.
            streamed: whether the client gets messages as they arrive, not only the complete answer.
            permits: permits of the answers, if they were reserved; released here.

        Raises:
            RequestError: any; everything has been cleaned up.
        """
        observers = self._observers(spec, is_chat=extras.chat is not None or spec.HasField("chat"))
        with RequestWatch(observers, deadline.passed, streamed=streamed) as watch:
            accepted = await self._accept(spec, extras, watch)
            granted = self._admit(accepted, permits)
            generation = Generation(self._services, accepted, granted, deadline, watch)
            reason = CancelReason.CLIENT
            try:
                if not permits:
                    generation.expect_first_token()
                yield await generation.start()
            except TargetsInfeasible as error:
                if (refusal := generation.refusal(error)) is not None:
                    raise refusal from error
                raise
            except ClientStalled:
                reason = CancelReason.STALLED
                raise
            except asyncio.CancelledError:
                if deadline.passed():
                    reason = CancelReason.DEADLINE
                raise
            finally:
                generation.close(reason)

    async def _accept(self, spec: pb.GenerationSpec, extras: RequestExtras, watch: RequestWatch) -> AcceptedRequest:
        """Checks a request, and reports to `watch` that it can be served."""
        attachment = self._services.engines.attachment(spec.model)
        model = convert.named_model(spec.model, attachment.model)
        room = convert.num_output_tokens(spec.stop, model, extras.default_max_tokens)
        truncation = extras.prompt_options.truncation(model, room)
        prompt: Prompt | None = extras.chat
        if prompt is None:
            prompt = await in_slices(token_prompt(spec, model, truncation))
        targets = latency_targets(spec, self._classes, current_caller())
        if targets is not None:
            watch.add(TargetMeter(self._target_metrics, targets))
            self._services.feasibility.check_possible(targets)
        request = convert.generation_request(
            spec, model, prompt, extras.constraint, truncated=truncation is not None, targets=targets
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
        return AcceptedRequest(
            request, extras, model, PromptSize.of(request.prompt), truncation, parsing, accepted_at_s
        )

    def _admit(self, accepted: AcceptedRequest, reserved: Sequence[Permit]) -> Sequence[Permit]:
        """Returns a permit for each answer: those that are reserved, or new ones."""
        request = accepted.request
        if isinstance(request.prompt, TokenPrompt):
            self._services.admission.check_fits(request.num_answers, accepted.num_tokens)
        if reserved:
            return reserved
        (permits,) = self._services.admission.admit_call(
            [accepted.num_tokens], request.num_answers, accepted.accepted_at_s
        )
        return permits

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
                targets = latency_targets(specs[0], self._classes, current_caller())
                permits_by_spec = self._services.admission.admit_call(
                    [PromptSize.of_specs([spec]).plain_tokens for spec in specs], num_answers, time.monotonic()
                )
                if targets is not None and targets.ttft_s is not None:
                    self._expect_all(specs, targets)  # last, because it uses up a retry ticket
            except (QueueFull, TargetsInfeasible):
                self._count_shed(len(specs))
                if targets is not None:
                    self._target_metrics.note_outcome(targets.service_class, TargetOutcome.REFUSED, len(specs))
                raise
            except RequestError as error:
                self._metrics.refuse(error, len(specs))
                raise
            yield permits_by_spec
        finally:
            for permits in permits_by_spec:
                for permit in permits:
                    permit.release(time.monotonic())

    def _expect_all(self, specs: Sequence[pb.GenerationSpec], targets: LatencyTargets) -> None:
        """Checks the prompts of one call as if they were one: they have the same targets, and one retry ticket."""
        model = self.model(specs[0].model)
        size = PromptSize.of_specs(specs)
        now_s = time.monotonic()
        expected = self._services.feasibility.expect(targets, model.name, size, accepted_at_s=now_s, now_s=now_s)
        self._services.feasibility.forget(expected)

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
        permit = self._services.admission.admit(PromptSize.of(prompt).plain_tokens, time.monotonic())
        try:
            return await tokenize(prompt, model, "", self._services.chats, add_special_tokens=add_special_tokens)
        finally:
            permit.release(time.monotonic())


def _prompt_text(prompt: Prompt) -> str:
    """Returns a prompt as the request log shows it."""
    match prompt:
        case TextPrompt(text):
            return text
        case ChatPrompt(messages):
            return "\n".join(f"{message.role}: {''.join(message.content)}" for message in messages)
        case TokenPrompt(token_ids):
            return str(list(token_ids))
