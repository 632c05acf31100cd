"""The blocking client: one channel, any number of threads."""

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, Self, TypeVar, Unpack, overload

import grpc

from chairlift.client.connection import DEFAULT_TARGET, Tls, call_timeout_s, channel_options, key_metadata
from chairlift.client.errors import GenerationError, closed_error, generation_error
from chairlift.client.progress import Progress
from chairlift.client.prompt_batch import ManyOptions, Params, Prompt, PromptBatch
from chairlift.client.request import ChatTurns, GenerationOptions, count_request, generation_spec
from chairlift.client.streamed_answer import StreamedAnswer
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub

Response = TypeVar("Response")


class _ResponseCall(Protocol):
    """A server-streaming call of grpc."""

    def __iter__(self) -> Iterator[pb.StreamGenerateResponse]: ...

    def cancel(self) -> object: ...


class GenerationStream(StreamedAnswer):
    """A streamed answer: iterate over its chunks. Leaving a `with` block, or `cancel`, ends the generation.

    StreamedAnswer's attributes hold what was received so far.
    """

    def __init__(self, call: _ResponseCall, failure: Callable[[grpc.RpcError], GenerationError]) -> None:
        super().__init__()
        self._call = call
        self._failure = failure

    def __iter__(self) -> Iterator[pb.Chunk]:
        return self

    def __next__(self) -> pb.Chunk:
        """Returns the next chunk.

        Raises:
            GenerationError: the call failed; chunks before it remain valid.
        """
        try:
            for response in self._call:
                chunk = self._take(response)
                if chunk is not None:
                    return chunk
        except grpc.RpcError as error:
            raise self._failure(error) from error
        raise StopIteration

    def cancel(self) -> None:
        """Ends the generation; the engine frees its memory within two steps. Does nothing if it has ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """Calls a Chairlift server. Close it, or use it in a `with` block.

    Args:
        target: address of the server in gRPC's form: HOST:PORT or unix:PATH.
        api_key: key for servers that require one; None: the environment variable CHAIRLIFT_API_KEY, if set.
        tls: for servers that use TLS.

    Raises:
        OSError: a file of `tls` cannot be read.
        ValueError: the key has characters that no header can carry.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        self._metadata = key_metadata(api_key)
        self._channel = (
            grpc.insecure_channel(target, options=channel_options(target))
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options=channel_options(target))
        )
        self._stub = GenerationServiceStub(self._channel)
        self._is_closed = False

    def generate(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerationOptions]
    ) -> pb.GenerateResponse:
        """Runs a request to its end.

        Args:
            text: the prompt; or pass `token_ids` or `chat`.
            timeout_s: deadline, seconds; the server's scheduler knows it.
            options: see GenerationOptions.

        Raises:
            GenerationError: the call failed.
            TypeError: an unknown option, or not exactly one prompt.
            ValueError: a number that its field cannot hold.
        """
        request = pb.GenerateRequest(spec=generation_spec(text, options))
        return self._call(self._stub.Generate, request, timeout_s)

    def stream(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerationOptions]
    ) -> GenerationStream:
        """Starts a request and returns its answer as a stream. Arguments and errors as in `generate`."""
        request = pb.StreamGenerateRequest(spec=generation_spec(text, options))
        return GenerationStream(self._call(self._stub.StreamGenerate, request, timeout_s), self._failure)

    @overload
    def generate_many(
        self, prompts: Iterable[Prompt], params: Params = None, *, return_errors: Literal[False] = False,
        **options: Unpack[ManyOptions],
    ) -> list[pb.GenerateResponse]: ...  # fmt: skip

    @overload
    def generate_many(
        self, prompts: Iterable[Prompt], params: Params = None, *, return_errors: bool, **options: Unpack[ManyOptions]
    ) -> list[pb.GenerateResponse | GenerationError]: ...

    def generate_many(
        self, prompts: Iterable[Prompt], params: Params = None, *, return_errors: bool = False,
        **options: Unpack[ManyOptions],
    ) -> Sequence[pb.GenerateResponse | GenerationError]:  # fmt: skip
        """Runs many prompts and returns their answers in the prompts' order.

        Keeps `max_in_flight` prompts in flight, so that the engine's batch stays full. A prompt that the server rejects
        for lack of capacity is retried after the delay that the server names, for five minutes.

        Args:
            prompts: text, token ids or chat turns each.
            params: options of `generate` for all prompts, or one set for each.
            return_errors: an error takes the place of its answer; otherwise the first one is raised.
            options: see ManyOptions.

        Raises:
            GenerationError: a prompt failed; its note says which.
            TypeError: an unknown option, a prompt of another type, or not as many params as prompts.
            ValueError: a number that its field cannot hold.
        """
        batch = PromptBatch(prompts, params, return_errors=return_errors, **options)
        calls: dict[int, Any] = {}  # grpc's class for them is private
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        try:
            with Progress(len(batch.requests), show=batch.progress) as bar:
                while not batch.complete:
                    for index in batch.take_due(time.monotonic()):
                        calls[index] = self._call(self._stub.Generate.future, batch.requests[index], batch.timeout_s)
                        calls[index].add_done_callback(lambda _, index=index: done.put(index))
                    try:
                        index = done.get(timeout=batch.wait_s(time.monotonic()))
                    except queue.Empty:
                        continue
                    call = calls.pop(index)
                    if call.code() is grpc.StatusCode.OK:
                        batch.answered(index, call.result())
                    else:
                        batch.failed(index, self._failure(call), time.monotonic())
                    bar.update(batch.num_settled, batch.num_output_tokens)
        finally:
            for call in calls.values():
                call.cancel()
        return batch.outcomes()

    def count_tokens(
        self, text: str | None = None, *, chat: ChatTurns | None = None, model: str | None = None,
        return_token_ids: bool = False, timeout_s: float | None = None,
    ) -> pb.CountTokensResponse:  # fmt: skip
        """Counts the tokens of a prompt, including its template and special tokens.

        Raises:
            GenerationError: the call failed.
            TypeError: not exactly one prompt.
        """
        return self._call(self._stub.CountTokens, count_request(text, chat, model, return_token_ids), timeout_s)

    def get_model(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelResponse:
        """Returns the served model and its limits.

        Raises:
            GenerationError: the call failed.
        """
        return self._call(self._stub.GetModel, pb.GetModelRequest(model=model), timeout_s)

    def load_adapter(
        self, name: str, path: str, *, replace: bool = False, timeout_s: float | None = None
    ) -> pb.LoadAdapterResponse:
        """Loads a LoRA adapter into all engines of a server that allows it.

        Args:
            name: its name in requests.
            path: its folder on the engines' disks, absolute or relative to one of --lora-dir.
            replace: whether it may replace a loaded adapter of this name.
            timeout_s: deadline in seconds; None: none.

        Raises:
            GenerationError: the call failed; no engine has loaded it, unless the message says so.
        """
        return self._call(
            self._stub.LoadAdapter, pb.LoadAdapterRequest(name=name, path=path, replace=replace), timeout_s
        )

    def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> pb.UnloadAdapterResponse:
        """Unloads a LoRA adapter; answers in progress finish with it.

        Raises:
            GenerationError: the call failed.
        """
        return self._call(self._stub.UnloadAdapter, pb.UnloadAdapterRequest(name=name), timeout_s)

    def close(self) -> None:
        """Closes the channel. Running and later calls raise a GenerationError with the reason CLIENT_CLOSED."""
        self._is_closed = True
        self._channel.close()

    def _call(self, method: Callable[..., Response], request: object, timeout_s: float | None) -> Response:
        try:
            return method(request, timeout=call_timeout_s(timeout_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except ValueError as error:
            if self._is_closed:  # grpc's error for a closed channel
                raise closed_error() from error
            raise

    def _failure(self, error: grpc.RpcError) -> GenerationError:
        failure = generation_error(error)
        return closed_error() if self._is_closed and failure.status is grpc.StatusCode.CANCELLED else failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
