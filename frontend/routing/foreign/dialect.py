"""What the protos of other engines have in common: the interface that `attach.py` uses, and shared conversions."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.routing.foreign.continuation import Continuation, UnsupportedError
from frontend.routing.logprobs import LogprobBatch

DEFAULT_BLOCK_TOKENS = 16
"""Where an engine does not say how large its blocks are; only the free capacity depends on it."""

MAX_LOGPROBS = 20
"""vLLM's default, which the protos do not report; an engine with a lower limit refuses the request."""


class DialectError(Exception):
    """A message has a content that must not be; the message says what."""


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The engine's account of an end.

    Attributes:
        reason: the engine's word, such as "stop".
        matched_token_id: the token that ended the answer, if the engine says so.
        output_ids: the tokens that it lists once more: the last ones, or all.
    """

    reason: str
    matched_token_id: int | None
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Part:
    """The content of one response.

    Attributes:
        token_ids: new tokens.
        index: number of the answer, always 0 here.
        num_prompt_tokens: as the engine counts them; 0: it does not say.
        logprobs, prompt_logprobs: if there are any; the latter from the second token on.
        end: set in the last one.
    """

    token_ids: Sequence[int] = ()
    index: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: LogprobBatch | None = None
    prompt_logprobs: LogprobBatch | None = None
    end: PartEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine's model and limits, as it reports them.

    Attributes:
        max_model_len: most tokens of prompt and answer.
        vocab_size: 0: it does not say.
    """

    model: str
    revision: str = ""
    version: str = ""
    max_model_len: int
    vocab_size: int = 0
    end_token_ids: tuple[int, ...] = ()
    block_size: int = DEFAULT_BLOCK_TOKENS
    max_num_seqs: int = 0


@dataclass(slots=True)
class EngineLoads:
    """The sum of an engine's ranks.

    Attributes:
        capacity_tokens: of its KV cache; 0: it does not say.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    capacity_tokens: int = 0
    num_used_tokens: float = 0.0
    version: str = ""


class Dialect(ABC):
    """Speaks one proto over one channel.

    Args:
        channel: connected to the engine, or connecting.

    Attributes:
        kind: the engine's name in messages.
        service: full name of its gRPC service.
    """

    kind: ClassVar[str]
    service: ClassVar[str]

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._pb, make_stub = self._generated_code()
        self._stub = make_stub(channel)
        self._health: Any = HealthStub(channel)
        self._has_health = True

    @abstractmethod
    def _generated_code(self) -> tuple[Any, Callable[[grpc.aio.Channel], Any]]:
        """Returns the module of the messages, and what makes a stub; imports both."""

    @abstractmethod
    async def facts(self, timeout_s: float) -> EngineFacts:
        """Asks for the model and its limits."""

    async def check_health(self, timeout_s: float) -> str:
        """Returns what is wrong; empty: nothing is.

        Raises:
            grpc.aio.AioRpcError: the engine does not answer.
        """
        health = await self._stub.HealthCheck(self._pb.HealthCheckRequest(), timeout=timeout_s)
        return "" if health.healthy else health.message or "it is not healthy"

    async def takes_requests(self, timeout_s: float) -> bool:
        """Returns the answer of grpc.health.v1: no while a healthy engine warms up or stops; yes without the service.

        Raises:
            grpc.aio.AioRpcError: the engine does not answer.
        """
        if not self._has_health:
            return True
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(service=self.service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                raise
            self._has_health = False
            return True
        return bool(answer.status != health_pb2.HealthCheckResponse.NOT_SERVING)

    @abstractmethod
    async def heartbeat(self, timeout_s: float) -> EngineLoads | None:
        """Returns the load; None if this kind of engine reports none.

        Raises:
            DialectError: the engine says that it is not healthy.
            grpc.aio.AioRpcError: it does not answer.
        """

    @abstractmethod
    def request(self, request_id: str, submission: pb.Submission, rest: Continuation) -> Any:
        """Returns the message for Generate.

        Raises:
            UnsupportedError: this kind of engine lacks a parameter of the request.
        """

    @abstractmethod
    def part(self, response: Any, num_top: int, num_prompt_top: int) -> Part | None:
        """Returns the content of a response; None if this version knows none of it.

        Args:
            num_top, num_prompt_top: requested alternatives per token of the answer and of the prompt.

        Raises:
            DialectError: it contradicts itself.
        """

    @abstractmethod
    async def abort(self, request_id: str, timeout_s: float) -> None:
        """Tells the engine to drop a request, besides the cancelled call."""

    def generate(self, message: Any, timeout_s: float | None) -> Any:
        """Starts a Generate call."""
        return self._stub.Generate(message, timeout=timeout_s)

    def tokenizer_chunks(self, timeout_s: float) -> AsyncIterator[Any]:
        """Returns the chunks of the tokenizer's archive."""
        from smg_grpc_proto.generated import common_pb2

        chunks: AsyncIterator[Any] = self._stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=timeout_s)
        return chunks

    def cache_events(self) -> Any:
        """Returns a call that yields batches of events of the prefix cache, from its current state on."""
        from smg_grpc_proto.generated import common_pb2

        return self._stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())

    def _refuse(self, parameter: str) -> UnsupportedError:
        return UnsupportedError(f"{parameter} is not supported by {self.kind} engines")

    def _check_common(self, submission: pb.Submission) -> None:
        """Refuses what none of the protos can express."""
        sampling = submission.sampling
        if sampling.allowed_token_ids:
            raise self._refuse("allowed_token_ids")
        if sampling.bad_sequences:
            raise self._refuse("bad_words")
        if submission.cache_salt:
            raise self._refuse("cache_salt")

    @staticmethod
    def _common_sampling(sampling: pb.Sampling) -> dict[str, float]:
        """Returns the parameters that have one name in all of the protos."""
        names = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
        return {name: getattr(sampling, name) for name in names}

    async def _describe(self, timeout_s: float) -> tuple[Any, Any]:
        """Returns the answers of GetModelInfo and GetServerInfo."""
        model = await self._stub.GetModelInfo(self._pb.GetModelInfoRequest(), timeout=timeout_s)
        return model, await self._stub.GetServerInfo(self._pb.GetServerInfoRequest(), timeout=timeout_s)


def logprob_batch(token_ids: Sequence[int], columns: Any, num_top: int) -> LogprobBatch | None:
    """Converts OutputLogProbs of vLLM or SGLang, which have one message of alternatives per token.

    Args:
        token_ids: of the response.
        columns: the message; without entries, there are none.
        num_top: requested alternatives per token. The engine may send one more and in any order, because the drawn
            token is among them even if it is not probable.

    Raises:
        DialectError: entries are missing.
    """
    chosen = list(columns.token_logprobs)
    if not chosen:
        return None
    if len(chosen) != len(token_ids) or list(columns.token_ids) != list(token_ids):
        raise DialectError(f"log-probabilities of {len(chosen)} tokens for {len(token_ids)} tokens")
    return with_alternatives(chosen, list(map(_pairs, columns.top_logprobs)), num_top)


def prompt_logprob_batch(columns: Any, num_top: int) -> LogprobBatch | None:
    """Converts InputLogProbs of vLLM or SGLang, of which the first token has none."""
    entries = list(columns.token_logprobs)[1:]
    if not entries:
        return None
    if not all(entry.HasField("value") for entry in entries):
        raise DialectError("log-probabilities of the prompt are missing")
    return with_alternatives([entry.value for entry in entries], list(map(_pairs, columns.top_logprobs[1:])), num_top)


def _pairs(top: Any) -> list[tuple[float, int]]:
    return list(zip(top.values, top.token_ids, strict=False))


def with_alternatives(chosen: list[float], tops: Sequence[Sequence[tuple[float, int]]], num_top: int) -> LogprobBatch:
    """Returns the log-probabilities of tokens with the best alternatives of each.

    Args:
        chosen: of the tokens.
        tops: log-probability and token id of the alternatives of each token, in any order.
        num_top: alternatives to keep per token.

    Raises:
        DialectError: there are fewer.
    """
    batch = LogprobBatch(num_top, chosen)
    if not num_top:
        return batch
    if len(tops) != len(chosen):
        raise DialectError(f"alternatives of {len(tops)} tokens for {len(chosen)} tokens")
    for top in tops:
        best = sorted(top, key=lambda pair: -pair[0])[:num_top]
        if len(best) < num_top:
            raise DialectError(f"{len(best)} alternatives of a token, {num_top} were asked for")
        batch.top_values += [value for value, _ in best]
        batch.top_ids += [token_id for _, token_id in best]
    return batch
