"""Builds a conversation piece by piece, for APIs whose requests are not lists of chat messages."""

from dataclasses import dataclass, field

from frontend.slices import Sliced
from frontend.text.chat.messages import ChatMessage, ToolCall


@dataclass(eq=False, slots=True)
class Turn:
    """One turn, to which content may still be added."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    name: str = ""
    call_id: str = ""

    def as_message(self) -> ChatMessage:
        """Returns the turn as a chat message for the template."""
        content = self.texts[0] if len(self.texts) == 1 else tuple(self.texts) or ""
        return ChatMessage(self.role, content, self.name, self.reasoning, tuple(self.calls), self.call_id)


class Conversation:
    """The turns of one conversation, oldest first.

    Attributes:
        all: those so far.
    """

    def __init__(self) -> None:
        self.all: list[Turn] = []
        self._names: dict[str, str] = {}  # of tools, by call

    @property
    def has_begun(self) -> bool:
        """Whether there is a turn besides the system turn at the start."""
        return len(self.all) > 1 or (bool(self.all) and self.all[0].role != "system")

    def add_system(self, *texts: str) -> None:
        """Adds system text. Leading system texts are one turn, because many templates accept only one."""
        if len(self.all) == 1 and self.all[0].role == "system":
            self.all[0].texts += texts
        else:
            self.all.append(Turn("system", list(texts)))

    def turn_of(self, role: str) -> Turn:
        """Returns the last turn if it has this role, otherwise a new one."""
        if not (self.all and self.all[-1].role == role):
            self.all.append(Turn(role))
        return self.all[-1]

    def add_call(self, turn: Turn, call: ToolCall) -> None:
        """Adds a call to an assistant's turn."""
        turn.calls.append(call)
        self._names[call.call_id] = call.name

    def add_result(self, call_id: str, *texts: str) -> None:
        """Adds a tool's result."""
        self.all.append(Turn("tool", list(texts), name=self._names.get(call_id, ""), call_id=call_id))

    def messages(self) -> Sliced[tuple[ChatMessage, ...]]:
        """Returns the chat messages for the template, in slices."""
        messages = []
        for turn in self.all:
            messages.append(turn.as_message())
            yield
        return tuple(messages)
