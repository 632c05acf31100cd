"""Converts messages of content blocks to the turns of a conversation.

A user's message may contain tool results, which are separate turns of a chat template. Consecutive messages of one role
are one turn, as in Anthropic's API: many templates accept only alternating roles. So is a system message after the
start, marked as such: many templates accept one only at the start.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from frontend.api.http.bodies import ConversationObject, FreeObject
from frontend.api.http.conversation import Conversation
from frontend.api.http.errors import BodyError
from frontend.api.http.opaque_reasoning import decoded
from frontend.limits import MAX_CONTENT_PARTS
from frontend.slices import Sliced
from frontend.text.chat.messages import ChatMessage, ToolCall


class Block(ConversationObject):
    """A content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: FreeObject | None = None
    tool_use_id: str | None = None
    content: Any = None  # of a tool_result: a string, or text blocks


BILLING_HEADER = re.compile(r"x-anthropic-billing-header:([ \t]*\w+=[^;\n]*;)+\s*")
"""Claude Code's first system text: for Anthropic only, and different in each session or request, so that no later part
of the prompt would be found in the prefix cache."""

Content = str | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_CONTENT_PARTS)]


class Message(ConversationObject):
    """One message."""

    role: str
    content: Content


def turns(system: Content | None, messages: Sequence[Message]) -> Sliced[tuple[ChatMessage, ...]]:
    """Returns the conversation, in slices.

    Raises:
        BodyError: names the block that is not served or incomplete.
    """
    conversation = Conversation()
    if texts := _without_billing_header(_texts(system or [], "system")):
        conversation.add_system(*texts)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        match message.role:
            case "user":
                _add_user(conversation, message.content, where)
            case "assistant":
                _add_assistant(conversation, message.content, where)
            case "system":
                _add_system(conversation, message.content, where)
            case role:
                raise _refused(f"{where}.role is {role[:64]!r}, it must be user, assistant or system")
        yield
    return (yield from conversation.messages())


def _add_system(conversation: Conversation, content: Content, where: str) -> None:
    texts = _texts(content, f"{where}.content")
    if conversation.has_begun:
        reminders = [f"<system-reminder>\n{text}\n</system-reminder>" for text in texts]
        conversation.turn_of("user").texts += reminders
    else:
        conversation.add_system(*texts)


def _add_user(conversation: Conversation, content: Content, where: str) -> None:
    if isinstance(content, str):
        conversation.turn_of("user").texts.append(content)
        return
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        if block.type == "tool_result":
            if not block.tool_use_id:
                raise _refused(f"{at} needs tool_use_id")
            conversation.add_result(block.tool_use_id, *_result_texts(block.content, at))
        else:
            conversation.turn_of("user").texts.append(_text(block, at))


def _add_assistant(conversation: Conversation, content: Content, where: str) -> None:
    turn = conversation.turn_of("assistant")
    if isinstance(content, str):
        turn.texts.append(content)
        return
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        match block.type:
            case "thinking":
                turn.reasoning += block.thinking or decoded(block.signature or "")
            case "redacted_thinking":
                continue  # only the server that wrote it could read it
            case "tool_use":
                if not (block.id and block.name):
                    raise _refused(f"{at} needs id and name")
                conversation.add_call(
                    turn, ToolCall(block.id, block.name, json.dumps(block.input or {}, ensure_ascii=False))
                )
            case _:
                turn.texts.append(_text(block, at))


def _result_texts(content: Any, where: str) -> list[str]:
    match content:
        case None:
            return [""]
        case str():
            return [content]
        case list():
            texts = []
            for index, block in enumerate(content):
                match block:
                    case {"type": "text", "text": str(text)}:
                        texts.append(text)
                    case _:
                        kind = str(block.get("type"))[:64] if isinstance(block, dict) else type(block).__name__
                        raise _unserved(f"{where}.content[{index}]", kind)
            return texts
    raise _refused(f"{where}.content must be a string or a list of blocks")


def _texts(content: Content, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}[{index}]") for index, block in enumerate(content)]


def _without_billing_header(texts: list[str]) -> list[str]:
    header = BILLING_HEADER.match(texts[0]) if texts else None
    if header is None:
        return texts
    first = texts[0][header.end() :]
    return [first, *texts[1:]] if first else texts[1:]


def _text(block: Block, where: str) -> str:
    if block.type != "text":
        raise _unserved(where, block.type[:64])
    if block.text is None:
        raise _refused(f"{where} needs text")
    return block.text


def _unserved(where: str, kind: str) -> BodyError:
    served = "text, in assistant messages also thinking and tool_use, in user messages also tool_result"
    return _refused(f"{where} has the type {kind!r}; served are {served}")


def _refused(message: str) -> BodyError:
    return BodyError(400, message)
