"""The seam between running a schedule and talking to a server."""

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
    """Where and how to ask; workers open their own connections from it.

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
        tls_cert, tls_key: to show to servers that want one.
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
    """What a server says of itself before the run; None where it does not say."""

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
    """Where a target reports what it sees, the moment it sees it. Each method takes a microsecond or two."""

    def sent(self) -> None:
        """The call is about to be made; more than once if a refused request comes back."""

    def started(self, num_input_tokens: int, num_cached_tokens: int) -> None:
        """What the server says of the prompt; ABSENT where it does not."""

    def tokens(self, count: int) -> None:
        """A message with this many generated tokens has arrived; never called for an empty or role-only one."""

    def finished(
        self,
        num_output_tokens: int,
        *,
        queued_us: int = -1,
        prefill_us: int = -1,
        num_preemptions: int = -1,
    ) -> None:
        """The server's last words; ABSENT where it does not say."""


class RequestFailedError(Exception):
    """A request ended without its answer; the text goes into the report once for all requests that share it."""


class RequestTimedOutError(RequestFailedError):
    """Its deadline passed."""


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
        """Tokens that the server makes of a prompt with this text, what it adds included; for prompts as text only.

        Raises: TargetError: it does not say.
        """

    def prepare(self, request: PlannedRequest) -> Any:
        """The request in the form that is sent, so that nothing is built when it is due."""

    async def send(self, prepared: Any, sink: Sink, retry_ticket: str = "") -> None:
        """Sends it and reads the answer to its end. Cancelling the coroutine cancels the call.

        Args:
            prepared: of `prepare`; may be sent again.
            sink: what is seen goes there.
            retry_ticket: of the refusal after which the request comes back.

        Raises: RequestFailedError, RequestTimedOutError, RequestRefusedError.
        """

    async def close(self) -> None:
        """Closes the connections."""
