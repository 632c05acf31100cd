"""Response of /v1/messages: GenerationSpec, events and message."""

import math
import re
from typing import Any

from pydantic_core import from_json

from chairlift.service.structured.output_constraint import OutputConstraint
from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.anthropic.bodies import MessagesBody
from frontend.api.anthropic.errors import error_content
from frontend.api.http.content_blocks import Block, BlockClosed, BlockGrown, BlockKind, BlockOpened, BlockStep
from frontend.api.http.generation_spec import sampling_spec
from frontend.api.http.opaque_reasoning import encoded
from frontend.api.http.response_builder import JsonObject, SingleAnswerBuilder
from frontend.request.request import ChatPrompt
from frontend.text.served_model import ServedModel

_SIGNATURE = "unsigned"
"""Signature of visible thinking, never checked. Clients drop thinking without a signature."""

_HALF_CHARACTER = re.compile(
    r"(?P<whole>\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""An escape of JSON for half of a surrogate pair; what only contains one is `whole`."""


class MessageBuilder(SingleAnswerBuilder):
    """Builds the response to one call.

    Args:
        body: request body.
        model: the served model.
        request_id: of the call, without a prefix.
        chat: the conversation.
        constraint: what the answer must match; None: free text.
    """

    def __init__(
        self,
        body: MessagesBody,
        model: ServedModel,
        request_id: str,
        *,
        chat: ChatPrompt,
        constraint: OutputConstraint | None,
    ) -> None:
        super().__init__(
            sampling_spec(body, f"msg_{request_id}"),
            chat=chat,
            constraint=constraint,
            max_tokens=body.max_tokens,
            one_call=body.tool_use.one_call,
        )
        self._error_id = f"req_{request_id}"
        self._max_tokens = body.max_tokens
        self._shows_thinking = body.shows_thinking
        self._message: JsonObject = {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:  # noqa: ARG002
        """See EventBuilder.events."""
        match message.WhichOneof("event"):
            case "started":
                started = message.started
                prompt = pb.Usage(
                    num_prompt_tokens=started.num_prompt_tokens, num_cached_tokens=started.num_cached_tokens
                )
                self._message["usage"] = _usage(prompt)
                return [{"type": "message_start", "message": dict(self._message)}, {"type": "ping"}]
            case "chunk":
                steps = self._blocks.take(message.chunk)
                return [event for step in steps for event in self._step_events(step)]
        return self._finish(message.finished)

    def failure_events(self, error: Exception) -> list[JsonObject]:
        """See EventBuilder.failure_events."""
        return [error_content(error, self._error_id)]

    def answer(self) -> JsonObject:
        """See SingleAnswerBuilder.answer."""
        return {**self._message, "content": [self._content(block, whole=True) for block in self._blocks.all]}

    def _step_events(self, step: BlockStep) -> list[JsonObject]:
        block, index = step.block, step.block.index
        match step:
            case BlockOpened():
                content = self._content(block, whole=False)
                return [{"type": "content_block_start", "index": index, "content_block": content}]
            case BlockGrown(text=text):
                delta = self._delta(block, text)
                return [{"type": "content_block_delta", "index": index, "delta": delta}] if delta else []
            case BlockClosed():
                stop: JsonObject = {"type": "content_block_stop", "index": index}
                if block.kind is not BlockKind.REASONING:
                    return [stop]
                delta = {"type": "signature_delta", "signature": self._signature(block)}
                return [{"type": "content_block_delta", "index": index, "delta": delta}, stop]

    def _content(self, block: Block, *, whole: bool) -> JsonObject:
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "text", "text": block.text if whole else ""}
            case BlockKind.CALL:
                arguments = _arguments(block.text) if whole else {}
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
        thinking = block.text if whole and self._shows_thinking else ""
        return {"type": "thinking", "thinking": thinking, "signature": self._signature(block) if whole else ""}

    def _delta(self, block: Block, text: str) -> JsonObject | None:
        match block.kind:
            case BlockKind.TEXT:
                return {"type": "text_delta", "text": text}
            case BlockKind.CALL:
                return {"type": "input_json_delta", "partial_json": text}
        return {"type": "thinking_delta", "thinking": text} if self._shows_thinking else None

    def _signature(self, block: Block) -> str:
        return _SIGNATURE if self._shows_thinking else encoded(block.text)

    def _finish(self, finished: pb.Finished) -> list[JsonObject]:
        events = [event for step in self._blocks.close() for event in self._step_events(step)]
        stop_text = finished.stop_text if finished.reason == pb.FINISH_REASON_STOP_TEXT else None
        delta = {"stop_reason": self._stop_reason(finished), "stop_sequence": stop_text}
        usage = _usage(finished.usage)
        self._message |= {**delta, "usage": usage}
        return [*events, {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def _stop_reason(self, finished: pb.Finished) -> str:
        match finished.reason:
            case pb.FINISH_REASON_STOP_TEXT:
                return "stop_sequence"
            case pb.FINISH_REASON_MAX_TOKENS if finished.usage.num_output_tokens >= self._max_tokens:
                return "max_tokens"
            case pb.FINISH_REASON_MAX_TOKENS | pb.FINISH_REASON_CONTEXT_FULL:
                return "model_context_window_exceeded"
            case pb.FINISH_REASON_TIME_BUDGET:
                return "max_tokens"
        return "tool_use" if self._blocks.has_calls else "end_turn"


def _arguments(text: str) -> dict[str, Any]:
    """Parses arguments; those of a call that was cut off are partial.

    What a model can write and JSON cannot hold is replaced: half a character by U+FFFD, a number like 1e999 by null.
    """
    whole = _HALF_CHARACTER.sub(lambda found: found["whole"] or r"\ufffd", text)
    try:
        arguments = from_json(whole or "{}", allow_partial=True)
    except ValueError:
        return {}
    return _finite(arguments) if isinstance(arguments, dict) else {}


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {name: _finite(member) for name, member in value.items()}
        case list():
            return [_finite(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value


def _usage(usage: pb.Usage) -> JsonObject:
    """Returns Anthropic's usage, which splits prompt tokens into computed ones and prefix cache hits."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }
