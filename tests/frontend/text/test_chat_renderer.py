"""Conversations rendered in real worker processes: whatever a template does to one, other conversations go on."""

import asyncio
import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import tokenizers

from frontend.errors import InvalidRequest, ServerDraining
from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall
from frontend.text.chat_renderer import LIMITS, NUM_PROCESSES, ChatRenderer
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


@pytest.fixture
def make_tokenizer():
    made = []

    def make(template: str | bytes, **config) -> Tokenizer:
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1}))
        files = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
        if template:
            files["chat_template.jinja"] = template.encode() if isinstance(template, str) else template
        made.append(Tokenizer.from_files(files))
        return made[-1]

    yield make
    for tokenizer in made:
        tokenizer.close()


@pytest.fixture
async def make_renderer():
    renderers = []

    def make(limits=LIMITS) -> ChatRenderer:
        renderers.append(ChatRenderer(limits))
        return renderers[-1]

    yield make
    for renderer in renderers:
        await renderer.stop()
    assert not worker_ids(), "workers are left"


@pytest.fixture
def renderer(make_renderer):
    return make_renderer()


def worker_ids() -> set[int]:
    """The template workers of this process, as the system lists them."""
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


async def test_everything_of_a_conversation_reaches_the_template(renderer, make_tokenizer):
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


async def test_long_conversations_are_the_same_text(renderer, make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    texts = [f"{number} äöü\ud7ff\U0001f642 " * 20 for number in range(500)]
    assert await renderer.render(tokenizer, [ChatMessage("user", text) for text in texts]) == "".join(texts)


async def test_chat_without_a_template_is_an_invalid_request(renderer, make_tokenizer):
    assert "has no chat template" in await refusal(renderer, make_tokenizer(""))
    assert not worker_ids()


async def test_refusal_of_the_template_is_an_invalid_request(renderer, make_tokenizer):
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
async def test_template_that_costs_too_much_before_the_first_message_refuses_chat(
    make_renderer, make_tokenizer, source, says
):
    """Jinja computes what is constant while it compiles."""
    renderer, tokenizer = make_renderer(dataclasses.replace(LIMITS, start_timeout_s=0.5)), make_tokenizer(source)
    await renderer.prepare(tokenizer)
    assert says in await refusal(renderer, tokenizer)


async def test_requests_with_tools_have_a_template_of_their_own_if_the_model_has_one(renderer, make_tokenizer):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    tokenizer = make_tokenizer("", chat_template=named)
    assert await renderer.render(tokenizer, QUESTION) == "plain"
    assert await renderer.render(tokenizer, QUESTION, ChatOptions(template_kwargs={"x": 1})) == "plain"
    assert await renderer.render(tokenizer, QUESTION, ChatOptions(tools=({}, {}))) == "with 2"


async def test_half_a_character_in_a_call_is_an_invalid_request(renderer, make_tokenizer):
    tokenizer = make_tokenizer("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    call = ToolCall("c", "get", '{"a": "\\ud800"}')
    assert "half a character" in await refusal(renderer, tokenizer, [ChatMessage("assistant", tool_calls=(call,))])
    assert "half a character" in await refusal(
        renderer, make_tokenizer("{{ messages[0].content }}"), [ChatMessage("user", "\ud83d")]
    )


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("loop", "takes more than 0.5 s of CPU time"),
        ("power", "takes more than 0.5 s of CPU time"),
        ("recursion", "takes more than 0.5 s of CPU time"),
        ("memory", "takes more than 256 MiB of memory"),
        ("format", "takes more than 256 MiB of memory"),
        ("kwargs", "takes more than 256 MiB of memory"),
    ],
)
async def test_conversation_that_costs_too_much_is_refused_and_the_next_is_not(renderer, make_tokenizer, word, says):
    tokenizer = make_tokenizer(BY_CONTENT)
    message = await refusal(renderer, tokenizer, [ChatMessage("user", word)], OPTIONS)
    assert message == f"the model's chat template {says} for these messages"
    assert tokenizer.has_chat_template
    assert await renderer.render(tokenizer, QUESTION) == "the dog"


async def test_others_are_served_beside_one_that_takes_too_long(make_renderer, make_tokenizer):
    renderer, tokenizer = make_renderer(), make_tokenizer(BY_CONTENT)
    assert await renderer.render(tokenizer, QUESTION) == "the dog"
    (held,) = worker_ids()
    os.kill(held, signal.SIGSTOP)  # however long the others take, it is not done
    slow = asyncio.create_task(refusal(renderer, tokenizer, [ChatMessage("user", "loop")]))
    while renderer._pool._idle:  # it takes this one
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
    os.kill(held, signal.SIGSTOP)  # takes no processor's time
    monkeypatch.setattr("frontend.text.isolated.process._WALL_PER_CPU", 0.0)
    monkeypatch.setattr("frontend.text.isolated.process._LATE_S", 0.01)
    assert "takes more than 0.5 s of CPU time" in await refusal(renderer, tokenizer)
    assert held not in worker_ids()
    monkeypatch.undo()
    assert await renderer.render(tokenizer, QUESTION) == "the dog"


async def test_process_time_is_what_counts(make_renderer, make_tokenizer):
    """On a busy machine the clock on the wall runs on while a process waits for a processor."""
    limits = dataclasses.replace(LIMITS, timeout_s=0.2)
    renderer, tokenizer = make_renderer(limits), make_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}")
    await renderer.prepare(tokenizer)
    (worker,) = worker_ids()
    os.kill(worker, signal.SIGSTOP)
    task = asyncio.create_task(renderer.render(tokenizer, QUESTION))
    _, pending = await asyncio.wait({task}, timeout=0.5)
    assert pending
    os.kill(worker, signal.SIGCONT)
    assert await task == "user"


async def test_conversation_that_nobody_waits_for_any_more_leaves_its_process(renderer, make_tokenizer):
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
    assert await renderer.render(tokenizer, QUESTION) == "the dog", "an answer is nobody else's"
    assert worker_ids() == before


async def test_another_model_gets_processes_of_its_own(renderer, make_tokenizer):
    assert await renderer.render(make_tokenizer("one"), QUESTION) == "one"
    before = worker_ids()
    assert await renderer.render(make_tokenizer("two"), QUESTION) == "two"
    assert not before & worker_ids()


async def test_stopping_tells_who_waits(make_renderer, make_tokenizer):
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
