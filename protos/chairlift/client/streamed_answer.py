"""The state of a streamed answer, shared by both clients."""

from chairlift.v1 import generation_service_pb2 as pb


class StreamedAnswer:
    """An answer while it is generated.

    Attributes:
        started: request id, the prompt if requested, and the effective options; None until the first chunk.
        finished: finish reason, usage and timing of the first answer; None until it ends.
        all_finished: the same for each answer, by index; `num_answers` requests more than one.
        tool_calls: calls of the first answer received so far; `parse` requests them.
        all_tool_calls: the same for each answer that has any, by index.
    """

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self.all_finished: dict[int, pb.Finished] = {}
        self.all_tool_calls: dict[int, list[pb.ToolCall]] = {}

    @property
    def tool_calls(self) -> list[pb.ToolCall]:
        """Calls of the first answer received so far."""
        return self.all_tool_calls.get(0, [])

    def _take(self, response: pb.StreamGenerateResponse) -> pb.Chunk | None:
        """Applies a message; returns the chunk if it is one."""
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
