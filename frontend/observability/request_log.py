"""One line in the log for each request that has ended (`--log-requests`)."""

import logging
import time

from chairlift.v1 import generation_service_pb2 as pb
from frontend.observability.trace_context import Origin
from frontend.request.request import ChatPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt

MAX_PROMPT_CHARS = 1000

_log = logging.getLogger("frontend.requests")


class RequestLine:
    """What is noted of one request until its end.

    Args:
        origin: the call.
        spec: as received.
        with_prompt: whether the beginning of the prompt is part of the line.
    """

    def __init__(self, origin: Origin, spec: pb.GenerationSpec, *, with_prompt: bool) -> None:
        self._arrived_at_s = time.monotonic()
        self._with_prompt = with_prompt
        self._fields: dict[str, object] = {
            **({"request_id": spec.request_id[:128]} if spec.request_id else {}),
            "door": "grpc" if "rpc.system" in origin.attributes else "http",
            "call": origin.name,
        }

    def accept(self, request: GenerationRequest, model: str) -> None:
        """It asks for something that can be served here."""
        self._fields |= {"request_id": request.request_id, "model": model}
        if self._with_prompt:
            self._fields["prompt"] = _text(request.prompt)[:MAX_PROMPT_CHARS]

    def end(
        self,
        started: pb.Started | None,
        *,
        num_output_tokens: int,
        first_token_at_s: float,
        reason: str,
        trace_id: str,
    ) -> None:
        """It has ended.

        Args:
            started: None: without a token.
            num_output_tokens: tokens that its client was sent.
            first_token_at_s: time.monotonic(); means nothing without a token.
            reason: how it ended: an outcome, or the code of an error. Not its text, which may quote the request.
            trace_id: empty if there is no trace.
        """
        fields = self._fields
        total_s = time.monotonic() - self._arrived_at_s
        if started is not None:
            fields |= {
                "num_prompt_tokens": started.num_prompt_tokens,
                "num_cached_tokens": started.num_cached_tokens,
                "num_output_tokens": num_output_tokens,
            }
            if num_output_tokens:
                fields["ttft_s"] = round(first_token_at_s - self._arrived_at_s, 6)
        fields |= {"total_s": round(total_s, 6), "finish_reason": reason}
        if trace_id:
            fields["trace_id"] = trace_id
        _log.info("%s", " ".join(f"{name}={_shown(value)}" for name, value in fields.items()), extra=fields)


def _shown(value: object) -> str:
    """A word; what a client has chosen cannot end the line."""
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def _content(content: str | tuple[str, ...]) -> str:
    return content if isinstance(content, str) else "".join(content)


def _text(prompt: Prompt) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case ChatPrompt(messages):
            return "\n".join(f"{message.role}: {_content(message.content)}" for message in messages)
        case TokenPrompt(token_ids):
            return str(list(token_ids))
