"""Converts input items to the turns of a conversation.

An assistant's reasoning, message and calls are separate items but one turn of a chat template: adjacent ones are
joined.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from frontend.api.http.bodies import ConversationObject
from frontend.api.http.conversation import Conversation, Turn
from frontend.api.http.errors import BodyError
from frontend.api.http.opaque_reasoning import decoded
from frontend.limits import MAX_CONTENT_PARTS
from frontend.slices import Sliced
from frontend.text.chat.messages import ChatMessage, ToolCall

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class Part(ConversationObject):
    """A part of a content."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_CONTENT_PARTS)] | None


class Item(ConversationObject):
    """An input item of any type. Ids and statuses of returned items are ignored."""

    type: str | None = None
    role: str | None = None
    content: Content = None
    summary: Content = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None


def turns(instructions: str | None, items: str | Sequence[Item]) -> Sliced[tuple[ChatMessage, ...]]:
    """Returns the conversation, in slices.

    Raises:
        BodyError: names the item that is not served or malformed.
    """
    conversation = Conversation()
    if instructions:
        conversation.add_system(instructions)
    if isinstance(items, str):
        conversation.all.append(Turn("user", [items]))
    else:
        for index, item in enumerate(items):
            _add(conversation, item, f"input[{index}]")
            yield
    return (yield from conversation.messages())


def _add(conversation: Conversation, item: Item, where: str) -> None:
    match item.type or "message":
        case "message":
            texts = _texts(item.content, f"{where}.content")
            if item.role in ("system", "developer"):
                conversation.add_system(*texts)
            elif item.role == "assistant" and (turn := _open_turn(conversation)) is not None and not turn.texts:
                turn.texts += texts
            elif item.role in ("user", "assistant"):
                conversation.all.append(Turn(item.role, texts))
            else:
                raise _refused(f"{where}.role must be user, assistant, system or developer")
        case "function_call":
            if not (item.call_id and item.name):
                raise _refused(f"{where} needs call_id and name")
            turn = _open_turn(conversation)
            if turn is None:
                turn = Turn("assistant")
                conversation.all.append(turn)
            conversation.add_call(turn, ToolCall(item.call_id, item.name, item.arguments or ""))
        case "function_call_output":
            if not item.call_id:
                raise _refused(f"{where} needs call_id")
            conversation.add_result(item.call_id, *_texts(item.output, f"{where}.output"))
        case "reasoning":
            reasoning = _reasoning(item, where)
            if reasoning:
                conversation.all.append(Turn("assistant", reasoning=reasoning))
        case "item_reference":
            raise _refused(
                f"{where} is an item_reference, but this server stores no responses: send the item itself (clients "
                "that refer to earlier items do so unless the request has store: false)"
            )
        case kind:
            served = "message, function_call, function_call_output and reasoning"
            raise _refused(f"{where} has the type {kind[:64]!r}; served are {served}")


def _open_turn(conversation: Conversation) -> Turn | None:
    """The assistant's turn that the next of its items belongs to."""
    last = conversation.all[-1] if conversation.all else None
    return last if last is not None and last.role == "assistant" else None


def _texts(content: Content, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content or ()):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in (*_TEXTS, "refusal"):
            kind = part.type[:64]
            raise _refused(f"{where}[{index}] has the type {kind!r}: only text is served, no images, audio or files")
        texts.append(text)
    return texts


def _reasoning(item: Item, where: str) -> str:
    texts = _texts(item.content, f"{where}.content") or _texts(item.summary, f"{where}.summary")
    return "\n".join(texts) or decoded(item.encrypted_content or "")


def _refused(message: str) -> BodyError:
    return BodyError(400, message, param="input", code="unsupported_value")
