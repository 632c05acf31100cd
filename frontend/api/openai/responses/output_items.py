"""Converts content blocks to output items of the Responses API and to their events."""

from typing import Any

from frontend.api.http.content_blocks import Block, BlockClosed, BlockGrown, BlockKind, BlockOpened, BlockStep
from frontend.api.http.opaque_reasoning import encoded
from frontend.api.http.response_builder import JsonObject

_ID_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


class OutputItems:
    """The items of one response.

    Args:
        request_id: makes the items' ids.
        with_logprobs: whether text has its log-probabilities.
        with_summary: whether reasoning comes as a summary, which is the reasoning itself.
        with_encrypted: whether reasoning comes as `encrypted_content` too.

    Attributes:
        output: the items that are complete.
    """

    def __init__(self, request_id: str, *, with_logprobs: bool, with_summary: bool, with_encrypted: bool) -> None:
        self._request_id = request_id
        self._with_logprobs = with_logprobs
        self._with_summary = with_summary
        self._with_encrypted = with_encrypted
        self._rows = _TextLogprobs()
        self._logprobs: list[JsonObject] = []  # of the text item that is open
        self.output: list[JsonObject] = []

    def add_logprobs(self, rows: list[JsonObject]) -> None:
        """Takes the log-probabilities of the tokens behind the next steps."""
        self._rows.add(rows)

    def events(self, step: BlockStep, *, is_cut_off: bool = False) -> list[JsonObject]:
        """The events of one step, without sequence numbers.

        Args:
            is_cut_off: the answer ended before the model did.
        """
        block = step.block
        at: JsonObject = {"item_id": self._item_id(block), "output_index": block.index}
        part_at = {**at, "summary_index" if self._is_summary(block) else "content_index": 0}
        match step:
            case BlockOpened():
                self._logprobs = []
                item = self._item(block, "", "in_progress")  # empty: the deltas bring everything
                added = {"type": "response.output_item.added", "output_index": block.index, "item": item}
                return [added, *self._part_events("added", block, "", part_at)]
            case BlockGrown(text=text):
                event = {"type": f"response.{self._stem(block)}.delta", **part_at, "delta": text}
                if block.kind is BlockKind.TEXT:
                    event["logprobs"] = self._rows.take(text, begins=len(block.pieces) == 1)
                    self._logprobs += event["logprobs"]
                return [event]
            case BlockClosed():
                name = "arguments" if block.kind is BlockKind.CALL else "text"
                text = block.text
                done = {"type": f"response.{self._stem(block)}.done", **part_at, name: text}
                if block.kind is BlockKind.TEXT:
                    done["logprobs"] = self._logprobs
                elif block.kind is BlockKind.CALL:
                    done["name"] = block.name
                item = self._item(block, text, "incomplete" if is_cut_off else "completed")
                self.output.append(item)
                item_done = {"type": "response.output_item.done", "output_index": block.index, "item": item}
                return [done, *self._part_events("done", block, text, part_at), item_done]

    def _item(self, block: Block, text: str, status: str) -> JsonObject:
        is_done = status != "in_progress"
        item: JsonObject = {"id": self._item_id(block), "type": "message", "status": status}
        match block.kind:
            case BlockKind.TEXT:
                return item | {"role": "assistant", "content": [self._part(block, text)] if is_done else []}
            case BlockKind.CALL:
                call = {"call_id": block.call_id, "name": block.name, "arguments": text}
                return item | {"type": "function_call", **call}
        parts = [self._part(block, text)] if is_done else []
        item |= {"type": "reasoning", "summary": parts if self._with_summary else []}
        if not self._with_summary:
            item["content"] = parts
        item["encrypted_content"] = encoded(text) if self._with_encrypted and is_done else None
        return item

    def _part_events(self, what: str, block: Block, text: str, part_at: JsonObject) -> list[JsonObject]:
        if block.kind is BlockKind.CALL:
            return []
        kind = "reasoning_summary_part" if self._is_summary(block) else "content_part"
        return [{"type": f"response.{kind}.{what}", **part_at, "part": self._part(block, text)}]

    def _part(self, block: Block, text: str) -> JsonObject:
        if block.kind is BlockKind.REASONING:
            return {"type": "summary_text" if self._with_summary else "reasoning_text", "text": text}
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if self._with_logprobs:
            part["logprobs"] = self._logprobs
        return part

    def _stem(self, block: Block) -> str:
        match block.kind:
            case BlockKind.TEXT:
                return "output_text"
            case BlockKind.CALL:
                return "function_call_arguments"
        return "reasoning_summary_text" if self._with_summary else "reasoning_text"

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._request_id}_{block.index}"

    def _is_summary(self, block: Block) -> bool:
        return self._with_summary and block.kind is BlockKind.REASONING


class _TextLogprobs:
    """Matches the log-probability rows of all tokens to the text: marks, reasoning and calls have tokens too.

    Text may lag behind its tokens, while a character or a possible mark is incomplete.
    """

    def __init__(self) -> None:
        self._rows: list[JsonObject] = []

    def add(self, rows: list[JsonObject]) -> None:
        """Adds the rows of the next tokens."""
        self._rows += rows

    def take(self, text: str, *, begins: bool) -> list[JsonObject]:
        """Returns the rows of the next piece of text and drops those before it.

        Args:
            begins: whether this is the start of the text, which tokens of other blocks may precede.
        """
        data, wanted = b"".join(bytes(row["bytes"]) for row in self._rows), text.encode()
        start = data.rfind(wanted) if begins else data.find(wanted)
        if start < 0:  # invalid UTF-8 was replaced in the text
            taken, self._rows = self._rows, []
            return taken
        end = start + len(wanted)
        taken, kept, offset = [], [], 0
        for row in self._rows:
            if offset >= end:
                kept.append(row)
            elif offset + len(row["bytes"]) > start:
                taken.append(row)
            offset += len(row["bytes"])
        self._rows = kept
        return taken
