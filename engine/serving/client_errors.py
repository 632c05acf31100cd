"""Maps the errors of calls to gRPC statuses without a traceback in the log: handlers raise and never abort.

gRPC answers messages that it cannot parse with UNKNOWN and logs a traceback; it logs others for answers that it could
not deliver because the client had left, and for metadata that is not UTF-8. Messages are therefore parsed here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from chairlift.service.logs import ignore_faults_of_clients
from engine.errors import AdapterNotFound, CheckpointError, EngineDraining, NoFreeAdapterSlot, QueueFull, RequestError


class CallRefused(Exception):  # noqa: N818 - reads as the event it is
    """A call must end with a gRPC status."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class ClientErrors(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all methods."""

    def __init__(self) -> None:
        ignore_faults_of_clients()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's handler, wrapped; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parse, serializer = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming:  # it reads by itself, and its reads parse
            return grpc.stream_stream_rpc_method_handler(_guarded(handler.stream_stream), parse, serializer)
        guarded = _guarded(handler.unary_stream or handler.unary_unary, parse)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(guarded, response_serializer=serializer)
        return grpc.unary_unary_rpc_method_handler(guarded, response_serializer=serializer)


def _guarded(behavior: Callable[..., Any], parse: Callable[[Any], Any] = lambda request: request) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            try:
                outcome = behavior(parse(request), context)
                if not isinstance(outcome, AsyncIterator):
                    return await outcome
                async for response in outcome:
                    await context.write(response)
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the bytes are not this method's message")
            except (CallRefused, CheckpointError, RequestError) as error:
                await context.abort(_status_code(error), str(error))
        except grpc.aio.InternalError as error:  # gRPC raises it when the client has left
            raise asyncio.CancelledError from error

    return call


def _status_code(error: CallRefused | CheckpointError | RequestError) -> grpc.StatusCode:
    match error:
        case CallRefused(code=code):
            return code
        case AdapterNotFound():
            return grpc.StatusCode.NOT_FOUND
        case QueueFull() | NoFreeAdapterSlot():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case EngineDraining():
            return grpc.StatusCode.UNAVAILABLE
        case _:
            return grpc.StatusCode.INVALID_ARGUMENT
