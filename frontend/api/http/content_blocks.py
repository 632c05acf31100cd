"""Splits one answer into content blocks (reasoning, text, tool calls) for APIs whose answers are lists of blocks.

Each block is opened, extended and closed before the next one opens.
"""

from dataclasses import dataclass, field
from enum import Enum

from chairlift.v1 import generation_service_pb2 as pb


class BlockKind(Enum):
    """Type of a block."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(eq=False, slots=True)
class Block:
    """One part of an answer.

    Attributes:
        index: of the block in the answer.
        call_id, name: of a call and its tool.
        pieces: of its text so far; of a call, its arguments.
    """

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    """A block was opened."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrown:
    """`text`, which is not empty, was appended to a block."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockClosed:
    """A block is complete, or the answer ended inside it."""

    block: Block


BlockStep = BlockOpened | BlockGrown | BlockClosed


class Blocks:
    """The blocks of one answer.

    Args:
        one_call: leave out all calls but the first.

    Attributes:
        all: every block so far.
    """

    def __init__(self, *, one_call: bool) -> None:
        self._one_call = one_call
        self.all: list[Block] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a tool."""
        return any(block.kind is BlockKind.CALL for block in self.all)

    def take(self, chunk: pb.Chunk) -> list[BlockStep]:
        """Adds a chunk."""
        steps: list[BlockStep] = []
        if chunk.reasoning:
            steps += self._grow(BlockKind.REASONING, chunk.reasoning)
        if chunk.text:
            steps += self._grow(BlockKind.TEXT, chunk.text)
        for call in chunk.tool_calls:
            if call.index and self._one_call:
                continue
            if call.id:
                steps += self._open(BlockKind.CALL, call.id, call.name)
            if call.arguments_json:
                steps += self._grow(BlockKind.CALL, call.arguments_json)
        return steps

    def close(self) -> list[BlockStep]:
        """Closes the open block at the end of the answer."""
        if not self._is_open:
            return []
        self._is_open = False
        return [BlockClosed(self.all[-1])]

    def _grow(self, kind: BlockKind, text: str) -> list[BlockStep]:
        steps = [] if self._is_open and self.all[-1].kind is kind else self._open(kind)
        block = self.all[-1]
        block.pieces.append(text)
        return [*steps, BlockGrown(block, text)]

    def _open(self, kind: BlockKind, call_id: str = "", name: str = "") -> list[BlockStep]:
        steps = self.close()
        block = Block(len(self.all), kind, call_id, name)
        self.all.append(block)
        self._is_open = True
        return [*steps, BlockOpened(block)]
