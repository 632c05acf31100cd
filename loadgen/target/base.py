"""The interface between the sender of a schedule and a server."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Api = Literal["grpc", "completions", "chat", "null"]
PromptMode = Literal["ids", "text"]
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")


def without_credentials(text: str) -> str:
    """Returns a text without the users and passwords of its URLs: others read results."""
    return _CREDENTIALS.sub("", text)


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """The server under test and how to call it; each worker opens its own connections.

    Attributes:
        url: grpc(s)://HOST:PORT, grpc+unix:PATH, http(s)://HOST:PORT/v1, null:.
        api: how to talk to it.
        model: name to ask for; "" takes the only one.
        prompt_mode: token ids, or text where a server takes no ids.
        temperature: 0 is greedy.
        ignore_eos: answers have exactly the length that was asked for.
        timeout_s: of each request, from when it is sent; None: no limit.
        api_key: sent as a bearer token.
        tls_ca: certificates to trust instead of the usual ones, for grpcs and https.
        tls_cert, tls_key: the client certificate, for servers that require one.
    """

    url: str
    api: Api = "grpc"
    model: str = ""
    prompt_mode: PromptMode = "ids"
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float | None = None
    api_key: str = ""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts that a server reports before the run; None: not reported."""

    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    special_ids: frozenset[int] = frozenset()
    version: str = ""


@dataclass(frozen=True, slots=True)
class RequestTargets:
    """Latency that a request asks for.

    Attributes:
        service_class: name that the server knows; "": none.
        ttft_s, inter_token_s: seconds; None: the class's.
    """

    service_class: str = ""
    ttft_s: float | None = None
    inter_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: exactly one of token_ids [n] uint32 and text."""

    index: int
    token_ids: "NDArray[np.uint32] | None"
    text: str | None
    num_output_tokens: int
    targets: RequestTargets | None = None


class Sink(Protocol):
    """Receives the events of a call as they happen. Each method takes a microsecond or two."""

    def sent(self) -> None:
        """Called just before the call is made; again if a refused request is sent again."""

    def started(self, num_input_tokens: int, num_cached_tokens: int) -> None:
        """Takes the server's counts of the prompt; ABSENT: not reported."""

    def tokens(self, count: int) -> None:
        """Called when a message with generated tokens arrives, never for an empty or role-only one."""

    def finished(
        self,
        num_output_tokens: int,
        *,
        queued_us: int = -1,
        prefill_us: int = -1,
        num_preemptions: int = -1,
    ) -> None:
        """Takes the server's final counts and times; ABSENT: not reported."""


class RequestFailedError(Exception):
    """A request ended without its answer; the report shows each text once, with the number of its requests."""


class RequestTimedOutError(RequestFailedError):
    """The request's deadline passed."""


class RequestRefusedError(RequestFailedError):
    """The server refused a request because its latency targets cannot be met.

    Attributes:
        retry_after_s: seconds after which it may come back; None: the server named no time.
        retry_ticket: to present then; "" without one.
    """

    def __init__(self, text: str, retry_after_s: float | None, retry_ticket: str) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        self.retry_ticket = retry_ticket


class Target(Protocol):
    """Connections of one worker to one server; used by one event loop."""

    async def probe(self) -> TargetFacts:
        """Asks the server about itself.

        Raises: TargetError: no server answers, or the server lacks what the spec asks for.
        """

    async def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a prompt with this text, including those that it adds; for text prompts.

        Raises: TargetError: the server does not report it.
        """

    def prepare(self, request: PlannedRequest) -> Any:
        """Returns the request in the form that is sent, so that nothing is built when it is due."""

    async def send(self, prepared: Any, sink: Sink, retry_ticket: str = "") -> None:
        """Sends a request and reads its answer to the end. Cancelling the coroutine cancels the call.

        Args:
            prepared: from `prepare`; may be sent again.
            sink: receives the events.
            retry_ticket: of the refusal after which the request is sent again.

        Raises: RequestFailedError, RequestTimedOutError, RequestRefusedError.
        """

    async def close(self) -> None:
        """Closes the connections."""
