"""The request log (`--log-requests`): one line for each request that has ended."""

import logging
import time
from collections.abc import Callable

from chairlift.v1 import generation_service_pb2 as pb
from frontend.observability.request_events import RequestEnd, RequestEvents, RequestProgress
from frontend.observability.trace_context import Origin

MAX_PROMPT_CHARS = 1000

_log = logging.getLogger("frontend.requests")


class RequestLogLine(RequestEvents):
    """Collects the fields of one request's line.

    Args:
        origin: the call.
        spec: as received.
        with_prompt: whether the line has the beginning of the prompt.
    """

    def __init__(self, origin: Origin, spec: pb.GenerationSpec, *, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._fields: dict[str, object] = {
            **({"request_id": spec.request_id[:128]} if spec.request_id else {}),
            "api": "grpc" if "rpc.system" in origin.attributes else "http",
            "call": origin.name,
        }

    def accepted(self, request: RequestProgress, prompt_text: Callable[[], str]) -> None:
        self._fields |= {"request_id": request.request_id, "model": request.model_name}
        if self._with_prompt:
            self._fields["prompt"] = prompt_text()[:MAX_PROMPT_CHARS]

    def ended(self, request: RequestProgress, end: RequestEnd) -> None:
        fields = self._fields
        if request.started is not None:
            fields |= {
                "num_prompt_tokens": request.started.num_prompt_tokens,
                "num_cached_tokens": request.started.num_cached_tokens,
                "num_output_tokens": request.num_sent_tokens,
            }
            if request.num_sent_tokens:
                fields["ttft_s"] = round(request.first_token_at_s - request.arrived_at_s, 6)
        fields |= {"total_s": round(time.monotonic() - request.arrived_at_s, 6), "finish_reason": end.reason}
        if request.trace_id:
            fields["trace_id"] = request.trace_id
        _log.info("%s", " ".join(f"{name}={_shown(value)}" for name, value in fields.items()), extra=fields)


def _shown(value: object) -> str:
    """Returns the value as one word, so that text chosen by a client cannot forge another field or line."""
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)
