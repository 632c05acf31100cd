"""Chat templates that make FakeEngine answer as a test says, and the events of a streamed answer."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

ECHO = "{{ messages[-1].content }}"
"""The answer is the last message."""
HERMES = ECHO + "{# <tool_call> #}"
"""So it is, and may have calls."""
ALL = ECHO + "{# <tool_call> </think> #}"
"""So it is, and may have calls and reasoning."""
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.reasoning %}({{ m.reasoning }}){% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }} {{ m.name }}{% endif %}{% endfor %}{# <tool_call> #}"
)
"""The answer shows everything that the template gets of each message."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


async def streamed_events(pair: Any, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream; checks that each comes under its name."""
    url = f"http://127.0.0.1:{pair.app.http_port}{path}"
    async with aiohttp.ClientSession() as session, session.post(url, json={"stream": True, **body}) as response:
        assert response.status == 200
        name = ""
        async for line in response.content:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                event = json.loads(value)
                assert name == event["type"]
                yield event


def without_repeats(kinds: list[str]) -> list[str]:
    """The same without those that are equal to the one before."""
    return [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
