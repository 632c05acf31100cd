"""Input items as the turns of a conversation.

An assistant's reasoning, message and calls are separate items here and one turn in a chat template: neighbours are
joined. Leading instructions of all kinds become one system turn, because many templates take no more than one.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frontend.chat.messages import ChatMessage, ToolCall
from frontend.openai.error_object import BodyError

_ENCODED = "reasoning:"  # begins what stands in for encrypted reasoning


class _Item(BaseModel):
    """Keys that are not known here, such as ids and statuses of items that come back, have no effect."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class _TextPart(_Item):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class _Refusal(_Item):
    type: Literal["refusal"]
    refusal: str


_Parts = Annotated[list[_TextPart | _Refusal], Field(fail_fast=True)]


class _Message(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Parts


class _FunctionCall(_Item):
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutput(_Item):
    call_id: str
    output: str | Annotated[list[_TextPart], Field(fail_fast=True)]


class _Reasoning(_Item):
    content: Annotated[list[_TextPart], Field(fail_fast=True)] | None = None
    summary: Annotated[list[_TextPart], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None


def turns(instructions: str | None, items: str | Sequence[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    """The conversation.

    Raises:
        BodyError: an item that is not served, or has a wrong form; names it.
    """
    conversation = _Conversation()
    if instructions:
        conversation.instruct(instructions)
    if isinstance(items, str):
        conversation.say("user", items)
    else:
        for index, item in enumerate(items):
            conversation.add(item, f"input[{index}]")
    return tuple(conversation.turns)


def encoded_reasoning(text: str) -> str:
    """Reasoning as clients carry `encrypted_content`: opaque to them, but not encrypted."""
    return _ENCODED + base64.b64encode(text.encode()).decode()


_ItemT = TypeVar("_ItemT", bound=_Item)


class _Conversation:
    def __init__(self) -> None:
        self.turns: list[ChatMessage] = []
        self._names: dict[str, str] = {}  # of tools, by call

    def add(self, item: dict[str, Any], where: str) -> None:
        match item.get("type", "message"):
            case "message":
                message = _checked(_Message, item, where)
                content = _content(message.content)
                if message.role in ("system", "developer"):
                    self.instruct(content)
                else:
                    self.say(message.role, content)
            case "function_call":
                call = _checked(_FunctionCall, item, where)
                self._names[call.call_id] = call.name
                self._call(ToolCall(call.call_id, call.name, call.arguments))
            case "function_call_output":
                output = _checked(_FunctionCallOutput, item, where)
                name = self._names.get(output.call_id, "")
                content = _content(output.output)
                self.turns.append(ChatMessage("tool", content, name=name, tool_call_id=output.call_id))
            case "reasoning":
                self._think(_reasoning(_checked(_Reasoning, item, where)))
            case "item_reference":
                raise BodyError(
                    400,
                    f"{where} is an item_reference, but responses are not stored on this server: send the item itself "
                    "(clients that refer to earlier items do so unless the request has store: false)",
                    param="input",
                    code="unsupported_parameter",
                )
            case kind:
                raise BodyError(
                    400,
                    f"{where} has the type {str(kind)[:64]!r}; served are message, function_call, function_call_output "
                    "and reasoning",
                    param="input",
                    code="unsupported_value",
                )

    def instruct(self, content: str | tuple[str, ...]) -> None:
        if all(turn.role == "system" for turn in self.turns) and self.turns:
            content = (*_texts(self.turns[0].content), *_texts(content))
            self.turns[0] = ChatMessage("system", content)
        else:
            self.turns.append(ChatMessage("system", content))

    def say(self, role: str, content: str | tuple[str, ...]) -> None:
        last = self._open_turn()
        if role == "assistant" and last is not None and not last.content:
            self.turns[-1] = replace(last, content=content)
        else:
            self.turns.append(ChatMessage(role, content))

    def _think(self, reasoning: str) -> None:
        if reasoning:
            self.turns.append(ChatMessage("assistant", reasoning=reasoning))

    def _call(self, call: ToolCall) -> None:
        last = self._open_turn()
        if last is None:
            self.turns.append(ChatMessage("assistant", tool_calls=(call,)))
        else:
            self.turns[-1] = replace(last, tool_calls=(*last.tool_calls, call))

    def _open_turn(self) -> ChatMessage | None:
        """The assistant's turn that the next of its items belongs to."""
        return self.turns[-1] if self.turns and self.turns[-1].role == "assistant" else None


def _checked(kind: type[_ItemT], item: dict[str, Any], where: str) -> _ItemT:
    try:
        return kind.model_validate(item)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = [str(part) for part in first["loc"]]
        if path[:1] in (["content"], ["output"]) and len(path) > 1:
            rule = "must be a string or a list of parts with text: images, audio and files are not served"
            raise BodyError(400, f"{where}.{path[0]} {rule}", param="input") from None
        raise BodyError(400, f"{'.'.join([where, *path])}: {first['msg']}", param="input") from None


def _content(content: str | Sequence[_TextPart | _Refusal]) -> str | tuple[str, ...]:
    if isinstance(content, str):
        return content
    texts = tuple(part.text if isinstance(part, _TextPart) else part.refusal for part in content)
    return texts[0] if len(texts) == 1 else texts


def _texts(content: str | tuple[str, ...]) -> tuple[str, ...]:
    return (content,) if isinstance(content, str) else content


def _reasoning(item: _Reasoning) -> str:
    text = "\n".join(part.text for part in item.content or item.summary or ())
    encoded = item.encrypted_content or ""
    if text or not encoded.startswith(_ENCODED):
        return text
    try:
        return base64.b64decode(encoded.removeprefix(_ENCODED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
