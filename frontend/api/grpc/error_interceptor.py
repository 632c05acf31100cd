"""Parses requests, runs handlers and converts their exceptions to statuses, for all methods.

Requests are parsed here because gRPC answers bytes it cannot parse (invalid UTF-8, say) with INTERNAL, as if the server
had failed, and never answers a call without a request. Handlers raise and never abort; UNKNOWN never reaches a client.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from chairlift.service.logs import ignore_faults_of_clients
from frontend.api.grpc.status import error_status
from frontend.api.grpc.wire_scan import MalformedMessageError, check_counts
from frontend.errors import ClientStalled, InvalidRequest
from frontend.limits import SMALL_REQUEST_BYTES
from frontend.slices import in_slices

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all methods: coroutines or async generators; no method streams requests only.

    Args:
        stall_timeout_s: seconds that a call's only request may take to arrive.
    """

    def __init__(self, *, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        ignore_faults_of_clients()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the wrapped handler; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, serializer = handler_call_details.method, handler.response_serializer
        parse = partial(_parsed, handler.request_deserializer)
        if handler.request_streaming:
            guarded = _guarded(handler.stream_stream, partial(_all_requests, parse), method)
            return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=serializer)
        take = partial(_only_request, parse, self._stall_timeout_s)
        guarded = _guarded(handler.unary_stream or handler.unary_unary, take, method)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=serializer)
        return grpc.stream_unary_rpc_method_handler(guarded, response_serializer=serializer)


def _guarded(
    behavior: Callable[..., Any], take: Callable[[Context], Awaitable[Any]], method: str
) -> Callable[..., Awaitable[Any]]:
    async def call(requests: object, context: Context) -> Any:  # noqa: ARG001 - gRPC's signature; context.read reads them too
        try:
            outcome = behavior(await take(context), context)
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
            # An inner task was cancelled, not this call. gRPC would never answer the client.
            await _abort(context, method, error)
        except grpc.aio.InternalError as error:  # raised by gRPC when the client has disconnected
            raise asyncio.CancelledError from error
        except Exception as error:
            await _abort(context, method, error)

    return call


async def _parsed(deserializer: Any, data: bytes) -> Any:
    """Parses a message; the counts of a large one are checked first.

    Args:
        deserializer: `FromString` of the message's class.
    """
    try:
        if len(data) <= SMALL_REQUEST_BYTES:
            return deserializer(data)
        await in_slices(check_counts(data, deserializer.__self__.DESCRIPTOR))
        await asyncio.sleep(0)  # parsing checks UTF-8: one long iteration of the event loop with the above
        message = deserializer(data)
        await asyncio.sleep(0)
        return message
    except (DecodeError, MalformedMessageError) as error:
        raise InvalidRequest(
            "the request cannot be parsed: its bytes are not this method's message, or a string is not valid UTF-8"
        ) from error


async def _only_request(parse: Callable[[bytes], Awaitable[Any]], timeout_s: float, context: Context) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(context)
    except TimeoutError as error:
        raise ClientStalled(f"the request has not arrived within {timeout_s:g} s") from error
    if data is None:
        raise InvalidRequest("the call has no request")
    return await parse(data)


async def _all_requests(parse: Callable[[bytes], Awaitable[Any]], context: Context) -> AsyncIterator[Any]:
    async def requests() -> AsyncIterator[Any]:
        while (data := await _read(context)) is not None:
            yield await parse(data)

    return requests()


async def _read(context: Context) -> bytes | None:
    """Returns the next request's bytes; None: there are no more."""
    data: Any = await context.read()
    return None if data is grpc.aio.EOF else data


async def _abort(context: Context, method: str, error: BaseException) -> None:
    status = error_status(error)
    if status.code is grpc.StatusCode.INTERNAL:
        logger.error("%s failed", method, exc_info=error)
    try:
        await context.abort(*status)
    except grpc.aio.InternalError:  # raised by gRPC when the client has disconnected
        logger.debug("%s: the client disconnected before it got the status: %s", method, status.details)
