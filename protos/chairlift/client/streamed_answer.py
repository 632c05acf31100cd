"""What a client knows of a stream so far; both clients' streams are made of it."""

from chairlift.v1 import generation_service_pb2 as pb


class StreamedAnswer:
    """An answer while it is generated.

    Attributes:
        started: request id, the prompt if asked for, and the values in force; None until the first chunk is there.
        finished: why it ended, what it used, where the time went; None until then. Of several answers, this is the
            first one's.
        all_finished: the same for every answer, by its index; `num_answers` asks for more than one.
        tool_calls: calls of the first answer as far as they have come; `parse` asks for them.
        all_tool_calls: the same for every answer that has any, by its index.
    """

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self.all_finished: dict[int, pb.Finished] = {}
        self.all_tool_calls: dict[int, list[pb.ToolCall]] = {}

    @property
    def tool_calls(self) -> list[pb.ToolCall]:
        """Calls of the first answer."""
        return self.all_tool_calls.get(0, [])

    def _take(self, response: pb.StreamGenerateResponse) -> pb.Chunk | None:
        """Notes what a message says; returns the chunk, if it is one."""
        match response.WhichOneof("event"):
            case "chunk":
                for delta in response.chunk.tool_calls:
                    calls = self.all_tool_calls.setdefault(response.chunk.answer_index, [])
                    if delta.index == len(calls):
                        calls.append(pb.ToolCall(id=delta.id, name=delta.name))
                    calls[delta.index].arguments_json += delta.arguments_json
                return response.chunk
            case "started":
                self.started = response.started
            case "finished":
                self.all_finished[response.finished.answer_index] = response.finished
                self.finished = self.all_finished.get(0)
        return None
