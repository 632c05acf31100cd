"""Tests of `ChatRenderer` with real worker processes."""

import asyncio
import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import tokenizers

from frontend.errors import InvalidRequest, ServerDraining, WorkerUnavailable
from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall
from frontend.text.chat_renderer import LIMITS, NUM_PROCESSES, ChatRenderer
from frontend.text.isolated.child import ChildProcess
from frontend.text.isolated.worker import Clock
from frontend.text.tokenizer import Tokenizer

QUESTION = [ChatMessage("user", "the dog")]
BY_CONTENT = """\
{%- set word = messages[0].content -%}
{%- if word == 'loop' -%}
  {%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor -%}
{%- elif word == 'power' -%}{{ (10 ** (10 ** big)) % 7 }}
{%- elif word == 'memory' -%}{{ ('x' * (10 ** 10)) | length }}
{%- elif word == 'format' -%}{{ '%*d' | format(10 ** 9, 7) | length }}
{%- elif word == 'kwargs' -%}{{ ('x' * times) | length }}
{%- elif word == 'recursion' -%}
  {%- macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n > 0 }}{% endmacro %}{{ f(60) -}}
{%- else -%}{{ word }}
{%- endif -%}"""
OPTIONS = ChatOptions(template_kwargs={"big": 9, "times": 10**10})
SHORT_LIMITS = dataclasses.replace(LIMITS, timeout_s=0.1, start_timeout_s=0.5)


@pytest.fixture
def make_tokenizer():
    made = []

    def make(template: str | bytes, **config) -> Tokenizer:
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1}))
        files = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
        if template:
            files["chat_template.jinja"] = template.encode() if isinstance(template, str) else template
        made.append(Tokenizer(files))
        return made[-1]

    yield make
    for tokenizer in made:
        tokenizer.close()


@pytest.fixture
async def make_renderer():
    renderers = []

    def make(limits=LIMITS, **options) -> ChatRenderer:
        renderers.append(ChatRenderer(limits, **options))
        return renderers[-1]

    yield make
    for renderer in renderers:
        await renderer.stop()
    assert not worker_ids(), "workers still run"


@pytest.fixture
def renderer(make_renderer):
    return make_renderer()


def worker_ids() -> set[int]:
    """Returns the process ids of this process's template workers, from /proc."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = (status.parent / "stat").read_text().rpartition(")")[2].split()[1]
            if b"template_worker" in status.read_bytes() and int(parent) == os.getpid():
                found.add(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def refusal(renderer, tokenizer, messages=QUESTION, options=None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await renderer.render(tokenizer, messages, options)
    assert caught.value.field == "spec.chat"
    return caught.value.message


async def test_template_gets_all_parts_of_a_conversation(renderer, make_tokenizer):
    tokenizer = make_tokenizer("{{ bos_token }}{{ messages | tojson }}{{ tools | tojson }}{{ x }}", bos_token="<s>")
    call = ToolCall("c1", "get", '{"city": "Köln 🙂"}')
    messages = [
        ChatMessage("user", ("two", "parts"), name="me"),
        ChatMessage("assistant", "", reasoning="hm", tool_calls=(call,)),
        ChatMessage("tool", "12", tool_call_id="c1"),
    ]
    options = ChatOptions(tools=({"name": "get", "z": 1, "a": [None, 1.5]},), template_kwargs={"x": 7})
    turns = [
        {"role": "user", "content": "two\nparts", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "hm"),
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"city": "Köln 🙂"}}}
            ],
        },
        {"role": "tool", "content": "12", "tool_call_id": "c1"},
    ]
    expected = "<s>" + json.dumps(turns, ensure_ascii=False) + json.dumps(list(options.tools)) + "7"
    assert await renderer.render(tokenizer, messages, options) == expected


async def test_long_conversation_is_rendered_unchanged(renderer, make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    texts = [f"{number} äöü\ud7ff\U0001f642 " * 20 for number in range(500)]
    assert await renderer.render(tokenizer, [ChatMessage("user", text) for text in texts]) == "".join(texts)


async def test_chat_is_an_invalid_request_without_a_template(renderer, make_tokenizer):
    assert "has no chat template" in await refusal(renderer, make_tokenizer(""))
    assert not worker_ids()


async def test_exception_of_the_template_is_an_invalid_request(renderer, make_tokenizer):
    tokenizer = make_tokenizer("{{ raise_exception('only users may speak') }}")
    assert "only users may speak" in await refusal(renderer, tokenizer)


@pytest.mark.parametrize("prepared", [False, True])
async def test_broken_template_refuses_chat_and_serves_text(renderer, make_tokenizer, caplog, prepared):
    tokenizer = make_tokenizer("{% if %}")
    if prepared:
        await renderer.prepare(tokenizer)
        assert not tokenizer.has_chat_template
    for _ in range(2):
        assert "cannot be compiled (line 1: " in await refusal(renderer, tokenizer)
    assert not tokenizer.has_chat_template
    assert caplog.text.count("chat prompts are refused") == 1
    assert await tokenizer.encode("a") == [0]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ (10 ** (10 ** 9)) % 7 }}", "takes more than 0.5 s of CPU time"),
        ("{{ 'x' * (10 ** 10) }}", "takes more than 256 MiB of memory"),
        ("{{ " + "(" * 50_000 + " }}", "nested too deeply"),
    ],
    ids=["power", "memory", "depth"],
)
async def test_template_that_exceeds_a_limit_while_it_is_compiled_refuses_chat(
    make_renderer, make_tokenizer, source, says
):
    """Jinja evaluates constant expressions while it compiles."""
    renderer, tokenizer = make_renderer(SHORT_LIMITS), make_tokenizer(source)
    await renderer.prepare(tokenizer)
    assert says in await refusal(renderer, tokenizer)


async def test_process_that_something_else_kills_while_it_starts_refuses_one_conversation(
    renderer, make_tokenizer, monkeypatch, caplog
):
    async def start_and_kill(command):
        process = await start(command)
        process.kill()
        return process

    start, tokenizer = ChildProcess.start, make_tokenizer("{{ messages[0].content }}")
    monkeypatch.setattr(ChildProcess, "start", start_and_kill)
    with pytest.raises(WorkerUnavailable) as caught:
        await renderer.render(tokenizer, QUESTION)
    assert caught.value.retry_after_s == 1.0
    assert "cannot start frontend.text.chat_template_worker" in caplog.text
    monkeypatch.undo()
    assert await renderer.render(tokenizer, QUESTION) == "the dog"


async def test_machine_without_room_for_a_process_refuses_one_conversation(renderer, make_tokenizer, monkeypatch):
    def fail(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    tokenizer = make_tokenizer("{{ messages[0].content }}")
    monkeypatch.setattr("frontend.text.isolated.child.subprocess.Popen", fail)
    with pytest.raises(WorkerUnavailable):
        await renderer.render(tokenizer, QUESTION)
    monkeypatch.undo()
    assert await renderer.render(tokenizer, QUESTION) == "the dog"


async def test_requests_with_tools_use_the_models_template_for_tools(renderer, make_tokenizer):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    tokenizer = make_tokenizer("", chat_template=named)
    assert await renderer.render(tokenizer, QUESTION) == "plain"
    assert await renderer.render(tokenizer, QUESTION, ChatOptions(template_kwargs={"x": 1})) == "plain"
    assert await renderer.render(tokenizer, QUESTION, ChatOptions(tools=({}, {}))) == "with 2"


async def test_half_a_surrogate_pair_is_an_invalid_request(renderer, make_tokenizer):
    tokenizer = make_tokenizer("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    call = ToolCall("c", "get", '{"a": "\\ud800"}')
    assert "half a character" in await refusal(renderer, tokenizer, [ChatMessage("assistant", tool_calls=(call,))])
    assert "half a character" in await refusal(
        renderer, make_tokenizer("{{ messages[0].content }}"), [ChatMessage("user", "\ud83d")]
    )


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("loop", "takes more than 0.1 s of CPU time"),
        ("power", "takes more than 0.1 s of CPU time"),
        ("recursion", "takes more than 0.1 s of CPU time"),
        ("memory", "takes more than 256 MiB of memory"),
        ("format", "takes more than 256 MiB of memory"),
        ("kwargs", "takes more than 256 MiB of memory"),
    ],
)
async def test_conversation_that_exceeds_a_limit_is_refused_and_the_next_is_rendered(
    make_renderer, make_tokenizer, word, says
):
    renderer, tokenizer = make_renderer(SHORT_LIMITS), make_tokenizer(BY_CONTENT)
    message = await refusal(renderer, tokenizer, [ChatMessage("user", word)], OPTIONS)
    assert message == f"the model's chat template {says} for these messages"
    assert tokenizer.has_chat_template
    assert await renderer.render(tokenizer, QUESTION) == "the dog"


async def test_other_conversations_are_rendered_while_one_process_is_busy(make_renderer, make_tokenizer):
    renderer, tokenizer = make_renderer(SHORT_LIMITS), make_tokenizer(BY_CONTENT)
    assert await renderer.render(tokenizer, QUESTION) == "the dog"
    (held,) = worker_ids()
    os.kill(held, signal.SIGSTOP)
    slow = asyncio.create_task(refusal(renderer, tokenizer, [ChatMessage("user", "loop")]))
    while renderer._pool._idle:  # until it has this process
        await asyncio.sleep(0)
    for number in range(20):
        assert await renderer.render(tokenizer, [ChatMessage("user", str(number))]) == str(number)
    assert len(worker_ids()) == NUM_PROCESSES
    assert not slow.done()
    os.kill(held, signal.SIGCONT)
    assert "takes more than" in await slow


async def test_process_that_does_not_end_itself_is_killed(make_renderer, make_tokenizer, monkeypatch):
    renderer, tokenizer = make_renderer(), make_tokenizer(BY_CONTENT)
    await renderer.prepare(tokenizer)
    (held,) = worker_ids()
    os.kill(held, signal.SIGSTOP)  # it uses no CPU time
    monkeypatch.setattr("frontend.text.isolated.process._WALL_PER_CPU", 0.0)
    monkeypatch.setattr("frontend.text.isolated.process._LATE_S", 0.01)
    assert "takes more than 0.5 s of CPU time" in await refusal(renderer, tokenizer)
    assert held not in worker_ids()
    monkeypatch.undo()
    assert await renderer.render(tokenizer, QUESTION) == "the dog"


def test_time_limit_counts_cpu_time():
    """A busy machine does not shorten the limit: the parent waits 20 times as long before it kills a process."""
    assert LIMITS.clock is Clock.CPU
    assert LIMITS.wall_s(0.5) == 0.5 * 20 + 1


async def test_cancelled_conversation_keeps_its_process(renderer, make_tokenizer):
    tokenizer = make_tokenizer("{{ messages[0].content }}")
    await renderer.prepare(tokenizer)
    before = worker_ids()
    for _ in range(3):
        task = asyncio.create_task(renderer.render(tokenizer, [ChatMessage("user", "left")]))
        while renderer._pool._idle and not task.done():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not renderer._pool._idle:
            await asyncio.sleep(0)
    assert await renderer.render(tokenizer, QUESTION) == "the dog", "the answer of another conversation"
    assert worker_ids() == before


async def test_another_model_gets_its_own_processes(renderer, make_tokenizer):
    assert await renderer.render(make_tokenizer("one"), QUESTION) == "one"
    before = worker_ids()
    assert await renderer.render(make_tokenizer("two"), QUESTION) == "two"
    assert not before & worker_ids()


async def test_stop_fails_waiting_requests(make_renderer, make_tokenizer):
    renderer, tokenizer = make_renderer(), make_tokenizer(BY_CONTENT)
    waiting = [
        asyncio.create_task(renderer.render(tokenizer, [ChatMessage("user", "loop")])) for _ in range(NUM_PROCESSES + 1)
    ]
    while not worker_ids():
        await asyncio.sleep(0)
    await renderer.stop()
    for task in waiting:
        with pytest.raises(ServerDraining):
            await task


async def test_a_default_that_is_the_templates_own_variable_refuses_chat_and_says_so(
    make_renderer, make_tokenizer, caplog
):
    renderer = make_renderer(default_kwargs={"bos_token": "x"})
    tokenizer = make_tokenizer("{{ messages[0].content }}", bos_token="<s>")
    await renderer.prepare(tokenizer)
    says = "'bos_token' in --default-chat-template-kwargs is the template's own"
    assert says in caplog.text
    assert says in await refusal(renderer, tokenizer)
