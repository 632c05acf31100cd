"""Renders conversations to prompts with the model's chat template.

A template is a program whose run time depends on the request, so it runs in killable processes.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from frontend.errors import InvalidRequest, ServerDraining
from frontend.text.chat.messages import ChatMessage, ChatOptions
from frontend.text.chat_template_files import ChatFiles
from frontend.text.isolated.pool import Hello, PoolStopped, ProcessPool
from frontend.text.isolated.process import JobLimits, LimitExceeded, StartRefused, first_frame
from frontend.text.isolated.worker import Clock
from frontend.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LIMITS = JobLimits(timeout_s=0.5, memory_bytes=256 << 20, clock=Clock.CPU, start_timeout_s=2.0)
"""Rendering 4,000 messages with tool calls takes 40 ms, compiling the largest templates 0.1 s."""

NUM_PROCESSES = 2  # one may be busy for the whole time limit
_LARGE_CHARS, _MANY = 50_000, 200  # encoding these takes a millisecond; larger conversations use a thread


_dumps = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps creates an encoder for each call


class ChatRenderer:
    """Renders conversations. The first one, or `prepare`, starts a process.

    Args:
        limits: limits of one conversation.
        default_kwargs: template variables for conversations that do not set them.
    """

    def __init__(self, limits: JobLimits = LIMITS, default_kwargs: Mapping[str, Any] | None = None) -> None:
        self._default_kwargs = dict(default_kwargs or {})
        self._pool = ProcessPool("frontend.text.chat_template_worker", limits, NUM_PROCESSES)

    async def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[ChatMessage],
        options: ChatOptions | None = None,
        *,
        field: str = "spec.chat",
    ) -> str:
        """Returns the prompt of a conversation.

        Args:
            tokenizer: the model's tokenizer with its templates. If they cannot be compiled, this is logged once, and
                the tokenizer refuses chat prompts from then on.
            messages: oldest first.
            options: None: no tools, and the assistant's message is opened at the end.
            field: the request's field for errors.

        Raises:
            InvalidRequest: the model has no usable template, or the template rejects these messages or exceeds a limit.
            WorkerUnavailable: no process can be started now.
            ServerDraining: this frontend has stopped.
        """
        options = options or ChatOptions()
        if refusal := tokenizer.chat.refusal_of(with_tools=bool(options.tools)):
            raise InvalidRequest(refusal, field=field)
        try:
            job = await _job(messages, options)
            answer = await self._pool.run(tokenizer.sha256, self._hello(tokenizer.chat), job)
        except StartRefused as error:
            _refuse(tokenizer, str(error))
            raise InvalidRequest(tokenizer.chat.refusal, field=field) from error
        except LimitExceeded as error:
            logger.warning("dropped a chat prompt: the chat template %s", error)
            raise InvalidRequest(f"the model's chat template {error} for these messages", field=field) from error
        except RecursionError:
            raise InvalidRequest("the chat's tools or variables are nested too deeply", field=field) from None
        except PoolStopped:
            raise ServerDraining("this server has stopped", retry_after_s=1.0) from None
        if "error" in answer:
            raise InvalidRequest(
                f"the model's chat template does not take these messages: {answer['error']}", field=field
            )
        prompt: str = answer["prompt"]
        return prompt

    async def prepare(self, tokenizer: Tokenizer) -> None:
        """Starts a process before the first conversation, and checks that the templates compile."""
        chat = tokenizer.chat
        if chat.shown is None:
            return
        try:
            await self._pool.start(tokenizer.sha256, self._hello(chat))
        except StartRefused as error:
            _refuse(tokenizer, str(error))

    async def stop(self) -> None:
        """Stops all processes; waiting requests fail."""
        await self._pool.stop()

    def _hello(self, chat: ChatFiles) -> Hello:
        async def hello() -> bytes:
            values = {
                "plain": chat.plain,
                "for_tools": chat.for_tools,
                "variables": dict(chat.variables),
                "default_kwargs": self._default_kwargs,
            }
            return first_frame(self._pool.limits, values)

        return hello


def _refuse(tokenizer: Tokenizer, problem: str) -> None:
    if tokenizer.chat.shown is not None:  # not refused yet
        logger.warning("chat prompts are refused: the model's chat template cannot be compiled: %s", problem)
        tokenizer.chat = tokenizer.chat.refused(problem)


async def _job(messages: Sequence[ChatMessage], options: ChatOptions) -> bytes:
    is_large = len(messages) > _MANY or len(options.tools) > _MANY
    if is_large or options.num_chars + sum(message.num_chars for message in messages) > _LARGE_CHARS:
        return await asyncio.to_thread(_encode, messages, options)
    return _encode(messages, options)


def _encode(messages: Sequence[ChatMessage], options: ChatOptions) -> bytes:
    """Encodes the frame message by message, because a single call would hold the GIL too long."""
    turns = ", ".join([_dumps(_values(message)) for message in messages])
    rest = {
        "tools": [dict(tool) for tool in options.tools],
        "template_kwargs": dict(options.template_kwargs),
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
    }
    return f'{{"messages": [{turns}], "options": {_dumps(rest)}}}'.encode(errors="surrogatepass")


def _values(message: ChatMessage) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "reasoning", "tool_call_id"):
        if text := getattr(message, name):
            values[name] = text
    if message.tool_calls:
        values["tool_calls"] = [(call.call_id, call.name, call.arguments) for call in message.tool_calls]
    return values
