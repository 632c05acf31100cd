"""Streams a response as server-sent events.

Nothing is sent before the first token, so that earlier errors have an HTTP status. Later errors become the last event
or events, in the format of the API that was called. In a silence, as during a failover or reasoning that is not shown,
comments keep the connection open: proxies close one that is idle, often after 60 s.
"""

import asyncio
import contextlib
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.active_calls import ActiveCalls
from frontend.api.http.disconnect import ClientGone, cancelled_on_disconnect
from frontend.api.http.errors import error_object
from frontend.api.http.fan_out import stream_all
from frontend.api.http.json_response import rendered_events, rendered_message, rendered_prompt
from frontend.api.http.response_builder import EventBuilder, JsonObject
from frontend.api.stall_guard import StallGuard
from frontend.errors import ClientStalled
from frontend.generation.deadline import Deadline
from frontend.generation.pipeline import GenerationPipeline

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
_COMMENT = b": keep-alive\n\n"


class EventStream(Response):
    """Runs a call and sends its events as they arrive.

    Args:
        builder: makes the requests and the events.
        generations: runs the requests.
        calls: counts active calls.
        deadline: of the call.
        stall_timeout_s: seconds that one event may wait for the client to read.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        builder: EventBuilder,
        generations: GenerationPipeline,
        calls: ActiveCalls,
        deadline: Deadline,
        *,
        stall_timeout_s: float,
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": builder.request_id}
        )
        del self.headers["content-length"]  # of an empty body
        self._builder = builder
        self._generations = generations
        self._calls = calls
        self._deadline = deadline
        self._writing = StallGuard(stall_timeout_s)
        self._started = False
        self._num_writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Sends the stream.

        Raises:
            RequestError: a request failed before its first token.
        """
        with self._calls.call(), contextlib.closing(self._writing), contextlib.suppress(ClientGone):
            try:
                async with cancelled_on_disconnect(receive):
                    keeping_alive = asyncio.create_task(self._keep_alive(send))
                    try:
                        await self._run(send)
                        await self._write(send, self._builder.event_format.end)
                    finally:
                        keeping_alive.cancel()
            except ClientStalled as error:
                logger.warning("%s: %s", self._builder.request_id, error.message)
                return  # without an end: the server then closes the connection
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, send: Send) -> None:
        async def take(prompt_index: int, message: pb.StreamGenerateResponse) -> None:
            rendered = rendered_prompt if message.HasField("started") else rendered_message
            for chunk in await rendered(self._builder, prompt_index, message):
                await self._write(send, chunk)

        try:
            await stream_all(self._generations, self._builder, self._deadline, take)
            await self._write(send, self._events(self._builder.last_events()))
        except ClientStalled:
            raise
        except Exception as error:
            if not self._started:
                raise
            if error_object(error).status == 500:
                logger.exception("%s failed", self._builder.request_id)
            await self._write(send, self._events(self._builder.failure_events(error)))

    def _events(self, contents: list[JsonObject]) -> bytes:
        return rendered_events(contents, self._builder.event_format)

    async def _write(self, send: Send, data: bytes) -> None:
        if not data:
            return
        self._num_writes += 1
        with self._writing:
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            num_before = self._num_writes
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._started and self._num_writes == num_before:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
