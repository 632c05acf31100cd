"""Refuses generations before their request is read, while the queue is full or the server stops."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from frontend.api.active_calls import ActiveCalls
from frontend.api.grpc.server import SERVICE_NAME
from frontend.errors import RequestError
from frontend.generation.pipeline import GenerationPipeline

_METHODS = frozenset(f"/{SERVICE_NAME}/{name}" for name in ("Generate", "StreamGenerate"))


class CapacityInterceptor(grpc.aio.ServerInterceptor):
    """Checks the queue when a call arrives. Must follow ApiKeyInterceptor: unauthenticated clients learn nothing.

    A burst of thousands of calls is refused without reading, parsing, checking or logging them.

    Args:
        generations: checks the queue.
        calls: knows whether the server stops.
    """

    def __init__(self, generations: GenerationPipeline, calls: ActiveCalls) -> None:
        self._generations = generations
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's own handler, or one that refuses."""
        if handler_call_details.method in _METHODS:
            try:
                self._calls.check_open()
                self._generations.check_capacity()
            except RequestError as error:
                return refusal(error)
        return await continuation(handler_call_details)


def refusal(error: RequestError) -> Any:
    """Returns a handler that refuses any method: a request stream that is not read may have any number of requests."""

    async def refuse(requests: object, context: object) -> NoReturn:  # noqa: ARG001 - gRPC's signature
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
