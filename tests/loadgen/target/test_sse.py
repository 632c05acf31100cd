import itertools
import json
import random

import pytest

from loadgen.target.sse import EventReader


def read(stream: bytes, cuts: list[int] | None = None) -> list[bytes]:
    reader = EventReader()
    places = [0, *(cuts or []), len(stream)]
    events = [event for a, b in itertools.pairwise(places) for event in reader.feed(stream[a:b])]
    return events + reader.close()


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b'data: {"a": 1}\n\ndata: [DONE]\n\n', [b'{"a": 1}', b"[DONE]"]),
        (b"data:no space\n\n", [b"no space"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b"data: crlf\r\n\r\ndata: next\r\n\r\n", [b"crlf", b"next"]),
        (b"data: cr\r\rdata: next\r\r", [b"cr", b"next"]),
        (b": ping\n\ndata: x\n: in between\ndata: y\n\n", [b"x\ny"]),
        (b"event: message\nid: 7\nretry: 10\ndata: x\n\n", [b"x"]),
        (b"event: ping\n\n\n\n", []),
        (b"data\n\ndata:\n\n", [b"", b""]),
        (b"\xef\xbb\xbfdata: after a byte order mark\n\n", [b"after a byte order mark"]),
        (b"data: the end is missing", [b"the end is missing"]),
        (b"data: half\ndata: way\n", [b"half\nway"]),
        (b"database: no\ndata : no\n data: no\n\n", []),
        (b"", []),
    ],
)
def test_events_are_read(stream: bytes, events: list[bytes]) -> None:
    assert read(stream) == events
    assert read(stream, list(range(1, len(stream)))) == events


def test_an_event_is_out_as_soon_as_its_empty_line_is_in() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\r\n\r") == [b"x"]
    assert reader.feed(b"\ndata: y\r\n") == []
    assert reader.feed(b"\r\n") == [b"y"]


@pytest.mark.parametrize("seed", range(200))
def test_any_stream_cut_anywhere_gives_the_same_events(seed: int) -> None:
    rng = random.Random(seed)
    stream, events = bytearray(rng.choice([b"", b"\xef\xbb\xbf"])), []
    for _ in range(rng.randint(0, 12)):
        ending = rng.choice([b"\n", b"\r\n", b"\r"])
        lines = []
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            value = json.dumps({"text": "".join(rng.choices("aé漢😀 \n\r", k=rng.randint(0, 8)))}, ensure_ascii=False)
            lines.append((b"data: " if rng.random() < 0.7 else b"data:") + value.encode())
        if lines:
            events.append(b"\n".join(line[5:].removeprefix(b" ") for line in lines))
        for noise in (b": ping", b":", b"event: x", b"id: 1", b"retry: 5", b"unknown"):
            if rng.random() < 0.2:
                lines.insert(rng.randint(0, len(lines)), noise)
        stream += b"".join(line + ending for line in lines) + ending
    cuts = sorted(rng.choices(range(len(stream) + 1), k=rng.randint(0, 40)))
    assert read(bytes(stream), cuts) == events
    assert all("text" in json.loads(part) for event in events for part in event.split(b"\n"))
