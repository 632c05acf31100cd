"""Serves one generating call over HTTP: reads the body, sets the deadline, runs the generations, sends the answer."""

import uuid
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.active_calls import ActiveCalls
from frontend.api.http.bodies import SamplingBody
from frontend.api.http.disconnect import cancelled_on_disconnect
from frontend.api.http.errors import REQUEST_ID_HEADER, BodyError
from frontend.api.http.event_stream import EventStream
from frontend.api.http.fan_out import collect_all, stream_all
from frontend.api.http.json_response import ChunkedJsonResponse, rendered, rendered_answer
from frontend.api.http.latency_headers import latency_targets
from frontend.api.http.request_body import BodyT, read_body
from frontend.api.http.response_builder import EventBuilder, ResponseBuilder, SingleAnswerBuilder
from frontend.api.http.unknown_parameters import UnknownParameters
from frontend.generation.deadline import Deadline
from frontend.generation.pipeline import GenerationPipeline
from frontend.limits import MAX_ID_CHARS

_MOST_ID_CHARS = MAX_ID_CHARS - len("chatcmpl-") - len("-2047")


TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 24 * 3600


class CallRunner:
    """Runs generating calls of all HTTP APIs.

    Args:
        generations: runs the requests.
        calls: counts active calls.
        unknown_parameters: policy for unknown parameters.
        stall_timeout_s: seconds that a body may take to arrive, and an event to be read.
        default_timeout_s: seconds that a call without a deadline may take; 0: no limit.

    Attributes:
        generations, calls: as given.
    """

    def __init__(
        self,
        generations: GenerationPipeline,
        calls: ActiveCalls,
        unknown_parameters: UnknownParameters,
        *,
        stall_timeout_s: float,
        default_timeout_s: float,
    ) -> None:
        self.generations = generations
        self.calls = calls
        self._unknown_parameters = unknown_parameters
        self._stall_timeout_s = stall_timeout_s
        self._default_timeout_s = default_timeout_s

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Reads and checks the body; see `read_body`. The response headers will list ignored parameters.

        Raises:
            ServerDraining, QueueFull: no request would be accepted; the body has not been read.
        """
        self.calls.check_open()
        self.generations.check_capacity()
        body = await read_body(request, kind, timeout_s=self._stall_timeout_s)
        request.state.answer_headers = self._unknown_parameters.headers(body)
        request.state.latency_targets = latency_targets(request.headers, body.service_class)
        return body

    def deadline(self, request: Request, body: SamplingBody, arrived_at_s: float) -> Deadline:
        """Returns the deadline of a call, in seconds from its arrival: the earlier of the header's and the body's, else
        the server's default. A time budget takes the default's place.

        Timeouts that clients enforce themselves (`timeout=` of OpenAI's client, say, and the header
        `x-stainless-read-timeout`) are not deadlines: they bound the wait for the next byte and close the connection.

        Args:
            arrived_at_s: time.monotonic() when the request arrived.

        Raises:
            BodyError: a timeout is not a number of seconds, or out of range.
        """
        timeouts_s = [] if body.timeout is None else [_checked_timeout("timeout", body.timeout, body.timeout)]
        if (text := request.headers.get(TIMEOUT_HEADER)) is not None:
            try:
                timeouts_s.append(_checked_timeout(TIMEOUT_HEADER, float(text), text[:64]))
            except ValueError:
                raise _timeout_error(TIMEOUT_HEADER, repr(text[:64])) from None
        default_s = self._default_timeout_s if body.time_budget is None else 0.0
        timeout_s = min(timeouts_s, default=default_s)
        return Deadline.at(arrived_at_s + timeout_s if timeout_s else None)

    async def respond(
        self, request: Request, builder: ResponseBuilder, deadline: Deadline, *, stream: bool
    ) -> Response:
        """Runs a call and returns its stream, or its response object."""
        _set_targets(request, builder)
        if stream:
            return self._stream(request, builder, deadline)

        async def body() -> list[bytes]:
            return await rendered(builder, await collect_all(self.generations, builder, deadline))

        return await self._unary(request, builder, body)

    async def respond_single(
        self, request: Request, builder: SingleAnswerBuilder, deadline: Deadline, *, stream: bool
    ) -> Response:
        """Runs a call for one answer, whose response object its events add up to."""
        _set_targets(request, builder)
        if stream:
            return self._stream(request, builder, deadline)

        async def take(prompt_index: int, message: pb.StreamGenerateResponse) -> None:
            builder.events(prompt_index, message)

        async def body() -> list[bytes]:
            await stream_all(self.generations, builder, deadline, take, streamed=False)
            return await rendered_answer(builder)

        return await self._unary(request, builder, body)

    def _stream(self, request: Request, builder: EventBuilder, deadline: Deadline) -> Response:
        stream = EventStream(builder, self.generations, self.calls, deadline, stall_timeout_s=self._stall_timeout_s)
        stream.headers.update(request.state.answer_headers)
        return stream

    async def _unary(
        self, request: Request, builder: EventBuilder, make_body: Callable[[], Awaitable[list[bytes]]]
    ) -> Response:
        with self.calls.call():
            async with cancelled_on_disconnect(request.receive):
                body = await make_body()
        headers = {REQUEST_ID_HEADER: builder.request_id, **request.state.answer_headers}
        return ChunkedJsonResponse(body, headers)


def _set_targets(request: Request, builder: EventBuilder) -> None:
    targets: pb.LatencyTargets | None = request.state.latency_targets
    if targets is not None:
        for spec in builder.specs:
            spec.latency_targets.CopyFrom(targets)


def name_call(request: Request, prefix: str, body_request_id: str | None = None) -> str:
    """Returns the prefixed id of a call; the response to an error has it too, so that the call is found in the log.

    Call it before the body is read, and again with the id of the body, which comes before that of the header.

    Raises:
        BodyError: see `_request_id_of`.
    """
    if body_request_id or not hasattr(request.state, "request_id"):
        request.state.request_id = prefix + _request_id_of(body_request_id, request.headers)
    request_id: str = request.state.request_id
    return request_id


def _request_id_of(body_request_id: str | None, headers: Mapping[str, str]) -> str:
    """Returns the client's request id from the body or the header, else a new one.

    Raises:
        BodyError: it is too long, or has characters that no header can carry.
    """
    request_id = body_request_id or headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
    if len(request_id) > _MOST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
        raise BodyError(
            400, f"request_id must have at most {_MOST_ID_CHARS} printable ASCII characters", param="request_id"
        )
    return request_id


def _checked_timeout(name: str, timeout_s: float, shown: object) -> float:
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise _timeout_error(name, shown)
    return timeout_s


def _timeout_error(name: str, shown: object) -> BodyError:
    return BodyError(
        400, f"{name} is {shown}, it must be a number of seconds above 0 and at most {MAX_TIMEOUT_S}", param=name
    )
