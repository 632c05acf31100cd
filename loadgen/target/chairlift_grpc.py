"""Our own gRPC API: chairlift.v1.GenerationService. Requests go out as bytes that were made before they were due."""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration import from_nanoseconds
from google.protobuf.duration_pb2 import Duration

from chairlift.client.errors import generation_error
from chairlift.v1 import generation_service_pb2 as pb
from loadgen.errors import TargetError
from loadgen.target.base import (
    PlannedRequest,
    RequestFailedError,
    RequestRefusedError,
    RequestTargets,
    RequestTimedOutError,
    Sink,
    TargetFacts,
    TargetSpec,
)
from loadgen.target.probe import probe_answer, probe_request, refusal
from loadgen.target.tls import grpc_credentials

STREAMS_PER_CHANNEL = 64
"""Servers commonly take 100 streams on a connection; what is above waits unseen."""
_SPARE_BELOW = 16
_MAX_MESSAGE_BYTES = 64 << 20
_SERVICE = "/chairlift.v1.GenerationService/"
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # this, or options that differ: else all share one connection
)


class _Connection:
    """One channel: one TCP connection of its own."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None, number: int) -> None:
        options = (*_OPTIONS, ("chairlift.connection", number))
        self.channel = (
            grpc.aio.insecure_channel(address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=options)
        )
        self.stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(
            _SERVICE + "StreamGenerate"
        )
        self.num_streams = 0


class ChairliftTarget:
    """Connections to a Chairlift frontend, more of them as more streams are open.

    Args:
        spec: its url is grpc://HOST:PORT, grpcs://HOST:PORT or grpc+unix:PATH.
        probe_timeout_s: for GetModel, seconds.

    Raises: TargetError: a file for TLS cannot be read.
    """

    def __init__(self, spec: TargetSpec, probe_timeout_s: float) -> None:
        self._spec = spec
        self._probe_timeout_s = probe_timeout_s
        scheme, _, rest = spec.url.partition(":")
        self._address = f"unix:{rest}" if scheme == "grpc+unix" else rest.removeprefix("//").rstrip("/")
        self._credentials = grpc_credentials(spec)
        self._metadata = (("authorization", f"Bearer {spec.api_key}"),) if spec.api_key else None
        self._connections = [_Connection(self._address, self._credentials, 0)]
        self._model = spec.model

    async def probe(self) -> TargetFacts:
        """See Target: GetModel, then an answer of a few tokens."""
        response = await self._ask(
            pb.GetModelRequest(model=self._spec.model), "GetModel", pb.GetModelResponse.FromString
        )
        self._model = response.model
        facts = TargetFacts(
            model=response.model,
            max_model_len=response.max_model_len or None,
            vocab_size=response.vocab_size or None,
            special_ids=frozenset(response.end_token_ids),
            version=response.weights_revision,
        )
        try:
            await probe_answer(self, self.prepare(probe_request(self._spec, facts)), self._spec)
        except RequestFailedError as error:
            raise refusal(self._spec, error) from error
        return facts

    async def count_tokens(self, text: str) -> int:
        """Tokens the server makes of this prompt. Raises: TargetError."""
        request = pb.CountTokensRequest(model=self._model, text=text)
        response: pb.CountTokensResponse = await self._ask(request, "CountTokens", pb.CountTokensResponse.FromString)
        return response.num_tokens

    def prepare(self, request: PlannedRequest) -> bytes:
        """See Target: the serialized StreamGenerateRequest."""
        length = request.num_output_tokens
        ignore_eos = self._spec.ignore_eos
        spec = pb.GenerationSpec(
            model=self._model,
            sampling=pb.SamplingOptions(temperature=self._spec.temperature),
            stop=pb.StopOptions(
                max_tokens=length, min_tokens=length if ignore_eos else None, ignore_end_token=ignore_eos
            ),
        )
        if request.token_ids is not None:
            spec.token_ids.ids.extend(request.token_ids.tolist())
        else:
            spec.text = request.text or ""
        if request.targets is not None:
            spec.latency_targets.CopyFrom(_latency_targets(request.targets))
        return pb.StreamGenerateRequest(spec=spec).SerializeToString()

    async def send(self, prepared: bytes, sink: Sink, retry_ticket: str = "") -> None:
        """See Target."""
        if retry_ticket:
            prepared += _with_ticket(retry_ticket)
        connection = self._connection()
        connection.num_streams += 1
        sink.sent()
        call = connection.stream(prepared, timeout=self._spec.timeout_s, metadata=self._metadata)
        try:
            await _read(call, sink)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                timeout_s = self._spec.timeout_s
                text = _text(error) if timeout_s is None else f"no end within {timeout_s:g} s"
                raise RequestTimedOutError(text) from error
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                refusal_error = generation_error(error)
                if refusal_error.reason == "TARGETS_INFEASIBLE":
                    raise RequestRefusedError(
                        _text(error), refusal_error.retry_delay_s, refusal_error.retry_ticket.decode()
                    ) from error
            raise RequestFailedError(_text(error)) from error
        finally:
            call.cancel()  # harmless when it is over
            connection.num_streams -= 1

    async def close(self) -> None:
        """See Target."""
        for connection in self._connections:
            await connection.channel.close()

    def _connection(self) -> _Connection:
        """The first with room. The last one being used, another is opened ahead of its need."""
        chosen = next((each for each in self._connections if each.num_streams < STREAMS_PER_CHANNEL), None)
        if chosen is None or (chosen is self._connections[-1] and chosen.num_streams >= _SPARE_BELOW):
            spare = _Connection(self._address, self._credentials, len(self._connections))
            spare.channel.get_state(try_to_connect=True)
            self._connections.append(spare)
        return chosen or self._connections[-1]

    async def _ask(self, request: Any, method: str, response_type: Callable[[bytes], Any]) -> Any:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._connections[0].channel.unary_unary(
            _SERVICE + method
        )
        try:
            data = request.SerializeToString()
            return response_type(await call(data, timeout=self._probe_timeout_s, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise TargetError(self._complaint(error, method)) from error

    def _complaint(self, error: grpc.aio.AioRpcError, method: str) -> str:
        url = self._spec.url
        match error.code():
            case grpc.StatusCode.UNAVAILABLE if "http1.x server" in (error.details() or ""):
                return (
                    f"{url} speaks HTTP/1.1 and no gRPC: if it is OpenAI-compatible, --target http://{self._address}/v1"
                )
            case grpc.StatusCode.UNAVAILABLE:
                reason = (error.details() or "").rpartition(": ")[2].rstrip("]")  # the layers of gRPC come before it
                return f"no server answers at {url} ({reason}): start the server, or check the address"
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"{url} does not answer {method} within {self._probe_timeout_s:g} s: look at the server's log"
            case grpc.StatusCode.UNAUTHENTICATED:
                return f"{url} refuses us ({_text(error)}): put its key into CHAIRLIFT_API_KEY"
            case grpc.StatusCode.UNIMPLEMENTED:
                return f"{url} speaks gRPC but has no {_SERVICE}{method}: it is another server, or an older one"
            case _:
                return f"{url} refuses {method}: {_text(error)}"


def _latency_targets(targets: RequestTargets) -> pb.LatencyTargets:
    return pb.LatencyTargets(
        service_class=targets.service_class,
        ttft=_duration(targets.ttft_s),
        inter_token=_duration(targets.inter_token_s),
    )


def _duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else from_nanoseconds(round(seconds * 1e9))


def _with_ticket(retry_ticket: str) -> bytes:
    """Returns what adds a ticket to a serialized request: messages that follow each other are merged when parsed."""
    targets = pb.LatencyTargets(retry_ticket=retry_ticket.encode())
    return pb.StreamGenerateRequest(spec=pb.GenerationSpec(latency_targets=targets)).SerializeToString()


async def _read(call: Any, sink: Sink) -> None:
    parse = pb.StreamGenerateResponse.FromString
    eof = grpc.aio.EOF
    is_finished = False
    while (message := await call.read()) is not eof:
        response = parse(message)
        match response.WhichOneof("event"):
            case "chunk":
                if response.chunk.num_tokens:
                    sink.tokens(response.chunk.num_tokens)
            case "started":
                sink.started(response.started.num_prompt_tokens, response.started.num_cached_tokens)
            case "finished":
                is_finished = True
                finished, timing = response.finished, response.finished.timing
                sink.finished(
                    finished.usage.num_output_tokens,
                    queued_us=_microseconds(timing.queued) + _microseconds(timing.tokenized),  # until it ran at all
                    prefill_us=_microseconds(timing.prefill),
                    num_preemptions=timing.num_preemptions,
                )
    if not is_finished:
        raise RequestFailedError("the stream ended without its last message")


def _microseconds(duration: Duration) -> int:
    return duration.seconds * 1_000_000 + duration.nanos // 1000


def _text(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {(error.details() or 'no reason given')[:200]}"
