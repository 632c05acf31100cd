"""Every error of every method through one door: parses requests, runs handlers, turns what they raise into a status.

Requests are parsed here and not by gRPC, which answers bytes it cannot parse (invalid UTF-8 in a string, say) with an
INTERNAL that looks like a fault of the server. A handler never aborts by itself; it raises, and UNKNOWN never reaches a
client.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from frontend.errors import InvalidRequest
from frontend.status import error_status

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all methods. They are coroutines or async generators; a client never streams alone."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's handler, wrapped; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, serializer = handler_call_details.method, handler.response_serializer
        parse = partial(_parsed, handler.request_deserializer)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _guarded(handler.stream_stream, partial(_all_parsed, parse), method), response_serializer=serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guarded(handler.unary_stream, parse, method), response_serializer=serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            _guarded(handler.unary_unary, parse, method), response_serializer=serializer
        )


def _guarded(behavior: Callable[..., Any], parse: Callable[[Any], Any], method: str) -> Callable[..., Awaitable[Any]]:
    async def call(incoming: Any, context: Context) -> Any:
        try:
            outcome = behavior(parse(incoming), context)
            if not isinstance(outcome, AsyncIterator):
                return await outcome
            async for response in outcome:
                await context.write(response)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client is gone, or the server stops
                raise
            # Something inside was cancelled, not this call. gRPC would leave the client without any answer.
            await _abort(context, method, error)
        except Exception as error:
            await _abort(context, method, error)

    return call


def _parsed(deserializer: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserializer(data)
    except DecodeError as error:
        raise InvalidRequest(
            "the request cannot be parsed: its bytes are not this method's message, or a string is not valid UTF-8"
        ) from error


async def _all_parsed(parse: Callable[[bytes], Any], requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield parse(data)


async def _abort(context: Context, method: str, error: BaseException) -> None:
    status = error_status(error)
    if status.code is grpc.StatusCode.INTERNAL:
        logger.error("%s failed", method, exc_info=error)
    try:
        await context.abort(*status)
    except grpc.aio.InternalError:  # what gRPC raises when the client has left meanwhile
        logger.debug("%s: the client left before it could be told: %s", method, status.details)
