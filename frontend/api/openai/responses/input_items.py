"""Input items as the turns of a conversation.

An assistant's reasoning, message and calls are separate items here and one turn in a chat template: neighbours are
joined.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from frontend.api.http.bodies import Returned
from frontend.api.http.conversation import Turn, Turns
from frontend.api.http.errors import BodyError
from frontend.api.http.opaque_reasoning import decoded
from frontend.limits import MAX_CONTENT_PARTS
from frontend.slices import Sliced
from frontend.text.chat.messages import ChatMessage, ToolCall

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class Part(Returned):
    """A part of a content."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_CONTENT_PARTS)] | None


class Item(Returned):
    """An input item of any type. Ids, statuses and the like of items that come back have no effect."""

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
    """The conversation, in slices.

    Raises:
        BodyError: an item that is not served, or has a wrong form; names it.
    """
    conversation = Turns()
    if instructions:
        conversation.instruct(instructions)
    if isinstance(items, str):
        conversation.all.append(Turn("user", [items]))
    else:
        for index, item in enumerate(items):
            _add(conversation, item, f"input[{index}]")
            yield
    return (yield from conversation.messages())


def _add(conversation: Turns, item: Item, where: str) -> None:
    match item.type or "message":
        case "message":
            texts = _texts(item.content, f"{where}.content")
            if item.role in ("system", "developer"):
                conversation.instruct(*texts)
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
            conversation.call(turn, ToolCall(item.call_id, item.name, item.arguments or ""))
        case "function_call_output":
            if not item.call_id:
                raise _refused(f"{where} needs call_id")
            conversation.answer(item.call_id, *_texts(item.output, f"{where}.output"))
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


def _open_turn(conversation: Turns) -> Turn | None:
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
