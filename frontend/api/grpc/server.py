"""The public gRPC service: one coroutine per request, one code path for unary and streamed answers.

Handlers raise; `error_interceptor.py` makes statuses of errors. No initial metadata is sent before the first token, so
that a client's retry policy covers all earlier errors.
"""

# ruff: noqa: N802 - names of the handlers are gRPC's

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import grpc

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceServicer
from frontend.api.active_calls import ActiveCalls
from frontend.api.stall_guard import StallGuard
from frontend.errors import ClientStalled, InvalidRequest
from frontend.generation.answer.collect import collect_answer
from frontend.generation.deadline import Deadline
from frontend.generation.pipeline import GenerationPipeline
from frontend.routing.adapter_control import AdapterControl
from frontend.slices import Sliced, in_slices, pieces

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(GenerationServiceServicer):
    """Serves chairlift.v1.GenerationService.

    Args:
        generations: runs the requests.
        calls: counts active calls.
        stall_timeout_s: seconds that one message may wait for the client to read.
        default_timeout_s: seconds that a generation without a deadline may take; 0: no limit.
        adapters: changes the adapters of the engines; None: that is not allowed.
    """

    def __init__(
        self,
        generations: GenerationPipeline,
        calls: ActiveCalls,
        *,
        stall_timeout_s: float,
        default_timeout_s: float,
        adapters: AdapterControl | None,
    ) -> None:
        self._adapters = adapters
        self._generations = generations
        self._calls = calls
        self._stall_timeout_s = stall_timeout_s
        self._default_timeout_s = default_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Runs one request and returns its complete answer."""
        deadline = self._deadline(context, request.spec)
        with self._call(context):
            async with deadline.enforce(), self._generations.open(request.spec, deadline, streamed=False) as answer:
                response = await collect_answer(answer.messages())
        await asyncio.sleep(0)  # serializing a large response takes an iteration of its own
        return response

    async def StreamGenerate(  # type: ignore[override] # gRPC takes coroutines that write to their context too
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> None:
        """Runs one request and streams its answer: Started, then Chunks, then exactly one Finished."""
        deadline = self._deadline(context, request.spec)
        with self._call(context), closing(StallGuard(self._stall_timeout_s)) as writing:
            async with deadline.enforce(), self._generations.open(request.spec, deadline) as answer:
                async for message in answer.messages():
                    with writing:
                        await context.write(message)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        """Counts the tokens of a prompt."""
        with self._call(context):
            token_ids = await self._generations.count_tokens(request)
            response = pb.CountTokensResponse(num_tokens=len(token_ids))
            if request.return_token_ids:
                await in_slices(_add_ids(response, token_ids))
            return response

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describes the served model and its limits."""
        with self._call(context):
            model = self._generations.model(request.model)
            return pb.GetModelResponse(
                model=model.name,
                weights_revision=model.weights_revision,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                end_token_ids=model.end_token_ids,
                has_chat_template=model.tokenizer.has_chat_template,
                tokenizer_sha256=model.tokenizer.sha256.hex(),
                default_sampling=pb.SamplingOptions(**cast(dict[str, Any], model.defaults)),
                adapters=[adapter.name for adapter in model.adapters],
                aliases=model.aliases,
            )

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Loads an adapter into all engines."""
        with self._call(context):
            sha256, num_engines = await self._changes().load(request.name, request.path, replace=request.replace)
            return pb.LoadAdapterResponse(sha256=sha256.hex(), num_engines=num_engines)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Unloads an adapter from all engines."""
        with self._call(context):
            return pb.UnloadAdapterResponse(num_engines=await self._changes().unload(request.name))

    def _changes(self) -> AdapterControl:
        if self._adapters is None:
            raise InvalidRequest("this server does not change adapters: start it with --allow-runtime-lora-updating")
        return self._adapters

    @contextmanager
    def _call(self, context: Context) -> Iterator[None]:
        with self._calls.call():
            note_sent = self._calls.add_unsent()
            context.add_done_callback(note_sent)  # type: ignore[arg-type]  # the stubs name a class
            try:
                yield
            except ClientStalled:  # unsent messages are not waited for
                note_sent(None)
                raise

    def _deadline(self, context: Context, spec: pb.GenerationSpec) -> Deadline:
        """Returns the client's deadline, else the server's default; a time budget takes the default's place."""
        is_bounded = context.time_remaining() is not None or spec.stop.HasField("time_budget")
        if not self._default_timeout_s or is_bounded:
            return Deadline(context.time_remaining)
        return Deadline.at(time.monotonic() + self._default_timeout_s)


def _add_ids(response: pb.CountTokensResponse, token_ids: Sequence[int]) -> Sliced[None]:
    for piece in pieces(token_ids):
        response.token_ids.extend(piece)
        yield
