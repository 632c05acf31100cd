"""Generations that would be refused whatever they ask for, refused before their request is read."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from frontend.api.active_calls import ActiveCalls
from frontend.api.grpc.server import SERVICE_NAME
from frontend.errors import RequestError
from frontend.generation.pipeline import Generations

_METHODS = frozenset(f"/{SERVICE_NAME}/{name}" for name in ("Generate", "StreamGenerate"))


class RoomInterceptor(grpc.aio.ServerInterceptor):
    """Looks at the queue when a call arrives. Belongs behind the check of keys: strangers are told nothing.

    A burst of thousands is refused at the cost of a call that is not read, not parsed, not checked and not logged.

    Args:
        generations: knows the queue.
        calls: knows whether the server stops.
    """

    def __init__(self, generations: Generations, calls: ActiveCalls) -> None:
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
                self._generations.check_room()
            except RequestError as error:
                return refusal(error)
        return await continuation(handler_call_details)


def refusal(error: RequestError) -> Any:
    """A handler for a method of any kind: a stream that is not read may hold one request, or any number."""

    async def refuse(requests: object, context: object) -> NoReturn:  # noqa: ARG001 - gRPC's form
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
