"""The blocking client: one channel, any number of threads."""

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, Unpack, overload

import grpc

from chairlift.client.connection import Tls, key_metadata
from chairlift.client.errors import GenerationError, closed_error, generation_error
from chairlift.client.progress import Progress
from chairlift.client.prompt_batch import DEFAULT_IN_FLIGHT, Prompt, PromptBatch
from chairlift.client.request import (
    CHANNEL_OPTIONS,
    DEFAULT_TARGET,
    ChatTurns,
    GenerationOptions,
    count_request,
    generation_spec,
)
from chairlift.client.streamed_answer import StreamedAnswer
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub

Response = TypeVar("Response")


class _ResponseCall(Protocol):
    """What a server-streaming call of grpc is here."""

    def __iter__(self) -> Iterator[pb.StreamGenerateResponse]: ...

    def cancel(self) -> object: ...


class GenerationStream(StreamedAnswer):
    """An answer while it is generated: iterate over its chunks. Leaving a `with` block, or `cancel`, ends the
    generation. What has come so far is in the attributes of StreamedAnswer.
    """

    def __init__(self, call: _ResponseCall) -> None:
        super().__init__()
        self._call = call

    def __iter__(self) -> Iterator[pb.Chunk]:
        return self

    def __next__(self) -> pb.Chunk:
        """The next chunk.

        Raises:
            GenerationError: the call failed; what came before stays valid.
        """
        try:
            for response in self._call:
                chunk = self._take(response)
                if chunk is not None:
                    return chunk
        except grpc.RpcError as error:
            raise generation_error(error) from error
        raise StopIteration

    def cancel(self) -> None:
        """Ends the generation; the engine frees its memory within two steps. Harmless when it is over."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """Calls a Chairlift frontend. Close it, or use it in a `with` block.

    Args:
        target: address of the frontend, as gRPC spells it: HOST:PORT or unix:PATH.
        api_key: for servers that want one; None: the environment variable CHAIRLIFT_API_KEY, if it has a value.
        tls: for servers that speak TLS.

    Raises:
        OSError: a file of `tls` cannot be read.
        ValueError: no header can carry the key.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        self._metadata = key_metadata(api_key)
        self._channel = (
            grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options=CHANNEL_OPTIONS)
        )
        self._stub = GenerationServiceStub(self._channel)
        self._is_closed = False

    def generate(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerationOptions]
    ) -> pb.GenerateResponse:
        """Runs a request to its end.

        Args:
            text: the prompt; or give `token_ids` or `chat`.
            timeout_s: deadline, seconds; the server schedules by it.
            options: see GenerationOptions.

        Raises:
            GenerationError: the call failed.
            TypeError: an unknown option, or not exactly one prompt.
            ValueError: a number that its field cannot hold.
        """
        request = pb.GenerateRequest(spec=generation_spec(text, options))
        return self._call(lambda: self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata))

    def stream(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerationOptions]
    ) -> GenerationStream:
        """Starts a request and returns its answer as it comes. Arguments and errors as `generate`."""
        request = pb.StreamGenerateRequest(spec=generation_spec(text, options))
        return GenerationStream(
            self._call(lambda: self._stub.StreamGenerate(request, timeout=timeout_s, metadata=self._metadata))
        )

    @overload
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        return_errors: Literal[False] = False,
        progress: bool | None = None,
    ) -> list[pb.GenerateResponse]: ...

    @overload
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        return_errors: bool,
        progress: bool | None = None,
    ) -> list[pb.GenerateResponse | GenerationError]: ...

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        timeout_s: float | None = None,
        return_errors: bool = False,
        progress: bool | None = None,
    ) -> Sequence[pb.GenerateResponse | GenerationError]:
        """Runs many prompts and returns their answers in the prompts' order.

        As many as `max_in_flight` are under way at any time, so that the engine's batch stays full; what the server has
        no room for, or no engine, is sent again after the time it says, for five minutes.

        Args:
            prompts: text, token ids or chat turns each.
            params: options of `generate` for all prompts, or one set for each.
            max_in_flight: more than the engine's seats (`--max-num-seqs`) keeps it busy.
            timeout_s: deadline of each prompt's call, seconds.
            return_errors: an error takes the place of its answer; otherwise the first one ends everything.
            progress: draw a progress bar; None: on a terminal, if tqdm is installed.

        Raises:
            GenerationError: a prompt failed; its note says which.
            TypeError: an unknown option, a prompt of another kind, or not as many params as prompts.
            ValueError: a number that its field cannot hold.
        """
        batch = PromptBatch(prompts, params, max_in_flight=max_in_flight, return_errors=return_errors)
        calls: dict[int, Any] = {}  # grpc's own class for them is private
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        try:
            with Progress(len(batch.requests), show=progress) as bar:
                while not batch.complete:
                    for index in batch.take_due(time.monotonic()):
                        start = partial(self._stub.Generate.future, batch.requests[index])
                        calls[index] = self._call(partial(start, timeout=timeout_s, metadata=self._metadata))
                        calls[index].add_done_callback(lambda _, index=index: done.put(index))
                    try:
                        index = done.get(timeout=batch.wait_s(time.monotonic()))
                    except queue.Empty:
                        continue
                    call = calls.pop(index)
                    if call.code() is grpc.StatusCode.OK:
                        batch.answered(index, call.result())
                    else:
                        batch.failed(index, generation_error(call), time.monotonic())
                    bar.update(batch.num_settled, batch.num_output_tokens)
        finally:
            for call in calls.values():
                call.cancel()
        return batch.outcomes()

    def count_tokens(
        self,
        text: str | None = None,
        *,
        chat: ChatTurns | None = None,
        model: str | None = None,
        return_token_ids: bool = False,
        timeout_s: float | None = None,
    ) -> pb.CountTokensResponse:
        """Tokens that a prompt would have, its template and special tokens included.

        Raises:
            GenerationError: the call failed.
            TypeError: not exactly one prompt.
        """
        request = count_request(text, chat, model, return_token_ids)
        return self._call(lambda: self._stub.CountTokens(request, timeout=timeout_s, metadata=self._metadata))

    def get_model(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelResponse:
        """The model that is served and its limits.

        Raises:
            GenerationError: the call failed.
        """
        request = pb.GetModelRequest(model=model)
        return self._call(lambda: self._stub.GetModel(request, timeout=timeout_s, metadata=self._metadata))

    def close(self) -> None:
        """Closes the channel. Calls that run end with a GenerationError, as do later ones (reason CLIENT_CLOSED)."""
        self._is_closed = True
        self._channel.close()

    def _call(self, call: Callable[[], Response]) -> Response:
        try:
            return call()
        except grpc.RpcError as error:
            failure = generation_error(error)
            if self._is_closed and failure.status is grpc.StatusCode.CANCELLED:
                raise closed_error() from error
            raise failure from error
        except ValueError as error:
            if self._is_closed:  # grpc's way to say so
                raise closed_error() from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
