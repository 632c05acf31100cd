"""Several engines behind one frontend: load balancing, models, names, and engines that are absent or drain."""

import asyncio
import logging
import threading

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from frontend.routing import resolver
from frontend.routing.resolver import name_and_port
from tests.hang import HANG_S
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine, paused_engine


async def test_requests_are_distributed_to_all_engines(make_world, read, ids):
    world = await make_world(3)
    for engine in world.engines.values():
        engine.pause()
    readings = [read(world, f"number {number}") for number in range(9)]
    await world.until(lambda: [engine.num_open for engine in world.engines.values()] == [3, 3, 3])
    for engine in world.engines.values():
        engine.resume()
    for number, reading in enumerate(readings):
        await reading.complete(ids(f"number {number}"))


async def test_busy_engine_gets_no_requests_while_another_is_idle(make_world, read, ids):
    def busy(**options):
        engine = FakeEngine(**options)
        engine.load = engine_pb.LoadStats(num_free_blocks=1000)
        return engine

    world = await make_world(2, make_engine=busy)
    first, second = world.engines.values()
    first.load = engine_pb.LoadStats(num_running=40, num_free_blocks=1000)
    first.set_state(engine_pb.ENGINE_STATE_SERVING)
    await world.until(
        lambda: world.app.engines._connections[first.address].attachment.session.load().num_requests == 40
    )
    for number in range(5):
        await read(world, f"number {number}").complete(ids(f"number {number}"))
    assert (len(first.submissions), len(second.submissions)) == (0, 5)


async def test_prompt_goes_to_the_engine_that_has_its_prefix(make_world, read, ids):
    world = await make_world(2)
    first, second = world.engines.values()
    texts = ["a" * 100, "b" * 100]
    for text in texts:
        await read(world, text).complete(ids(text))
    for number in range(6):
        text = texts[number % 2] + str(number)
        await read(world, text).complete(ids(text))
    for engine, text in ((first, "a"), (second, "b")):
        assert len(engine.submissions) == 4
        assert {submission.prompt_ids[0] for submission in engine.submissions} == {ids(text)[0]}


async def test_absent_engine_does_not_affect_requests(make_world, read, ids, caplog):
    with caplog.at_level(logging.INFO):
        world = await make_world(2, absent=1)
        for _ in range(5):
            await read(world, "abc").complete(ids("abc"))
    assert world.app._health.serving
    assert len([record for record in caplog.records if "no engine at" in record.message]) <= 1
    await world.start(1)
    await world.until_usable(2)


async def test_health_is_serving_while_any_engine_serves(make_world, read):
    world = await make_world(2)
    await world.kill(0)
    assert world.app._health.serving
    world.engines[1].set_state(engine_pb.ENGINE_STATE_DRAINING)
    await world.until(lambda: not world.app._health.serving)
    reading = await read(world, "abc").end()
    assert reading.error.code() is grpc.StatusCode.UNAVAILABLE
    assert "the engine is draining" in reading.error.details()
    await world.start(0)
    await world.until(lambda: world.app._health.serving)


async def test_draining_engine_finishes_its_requests_and_gets_no_new_ones(make_world, read, ids):
    world = await make_world(2)
    first, second = world.engines.values()
    first.pause()
    reading = read(world, "abc")
    await first.wait_for(lambda: first.num_open == 1)
    first.set_state(engine_pb.ENGINE_STATE_DRAINING)
    await world.until_usable(1)
    for _ in range(3):
        await read(world, "de").complete(ids("de"))
    assert len(second.submissions) == 3
    first.resume()
    await reading.complete(ids("abc"))
    assert len(first.submissions) == 1
    async with asyncio.timeout(HANG_S):
        await first.wait_for(lambda: first.has_all_acknowledged)  # a draining engine waits for it


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights_revision": "other"}, "weights_revision other instead of none"),
        ({"max_model_len": 100}, "max_model_len 100 instead of 4096"),
        ({"files": {"tokenizer.json": byte_tokenizer_files()["tokenizer.json"]}}, "tokenizer_sha256 "),
    ],
)
async def test_engine_with_another_model_is_not_used_and_logged_once(make_world, read, ids, caplog, options, said):
    caplog.set_level(logging.INFO)
    world = await make_world(2, absent=1)
    other = await world.start(1, **options)
    await world.until(lambda: other.instance_id in world.attached())
    for _ in range(4):
        await read(world, "abc").complete(ids("abc"))
    other.set_state(engine_pb.ENGINE_STATE_LOADING)
    other.set_state(engine_pb.ENGINE_STATE_SERVING)
    await world.until(lambda: caplog.messages.count(f"engine {other.address} is serving") == 2)
    assert not other.submissions
    lines = [record.message for record in caplog.records if "is not used" in record.message]
    assert len(lines) == 1
    assert said in lines[0]
    await world.kill(0)  # the other engine is then the only one
    await world.until_usable(1)
    assert (await read(world, "abc", max_tokens=50).end()).text == "abc"
    assert len(other.submissions) == 1


async def test_new_model_is_served_when_the_last_engine_with_the_old_one_drains(make_world, read, ids):
    world = await make_world(2, absent=1)
    old, new = world.engines[0], await world.start(1, weights_revision="new")
    old.pause()
    reading = read(world, "under way")
    await old.wait_for(lambda: old.num_open == 1)
    await world.until(lambda: new.instance_id in world.attached())
    old.set_state(engine_pb.ENGINE_STATE_DRAINING)
    await world.until(lambda: world.app.engines._connections[old.address].state == "draining")
    assert world.app._health.serving
    await read(world, "abc").complete(ids("abc"))
    assert (len(old.submissions), len(new.submissions)) == (1, 1)
    old.resume()
    await reading.complete(ids("under way"))


async def test_running_answer_fails_over_only_to_an_engine_with_its_model(make_world, read, ids):
    world = await make_world(3, absent=2)
    first = world.engines[0]
    first.pause()
    reading = read(world, "under way")
    await first.wait_for(lambda: first.num_open == 1)
    new = await world.start(1, weights_revision="new")
    await world.until(lambda: new.instance_id in world.attached())
    old = await world.start(2)
    await world.until_usable(2)
    await world.kill(0)
    await reading.complete(ids("under way"))
    assert [submission.epoch for submission in old.submissions] == [1]
    await read(world, "abc").complete(ids("abc"))
    assert len(new.submissions) == 1


async def test_second_answer_whose_model_has_no_engine_any_more_is_told_so(make_world, read_request, text_request):
    world = await make_world(2, absent=1, make_engine=paused_engine, failover_timeout_s=0.05)
    old = world.engines[0]
    request = text_request("abc", max_tokens=100)
    request.spec.num_answers = 2
    reading = read_request(world, request)
    await old.wait_for(lambda: old.num_open == 1)
    new = await world.start(1, weights_revision="new")
    await world.until(lambda: new.instance_id in world.attached())
    old.set_state(engine_pb.ENGINE_STATE_DRAINING)
    await world.until(lambda: world.app.engines._connections[old.address].state == "draining")
    await old.step()
    await reading.end()
    assert reading.error.code() is grpc.StatusCode.UNAVAILABLE
    assert reading.error.details() == "no engine takes requests for this model any more"


async def test_engine_with_two_addresses_counts_once(make_world, read, ids, tmp_path):
    world = await make_world(1)
    (tmp_path / "alias.sock").symlink_to(tmp_path / "0.sock")
    alias = f"unix:{tmp_path}/alias.sock"
    world.app.engines._fixed.add(alias)
    world.app.engines._add_connection(alias, was_found=False)
    await world.engines[0].wait_for(lambda: world.engines[0].num_sessions == 2)
    await world.until(lambda: world.app.engines._connections[alias].serving)
    assert len(world.app.engines._usable) == 1
    await read(world, "abc").complete(ids("abc"))


async def test_metrics_are_labelled_by_engine(make_world, read, ids, scrape):
    world = await make_world(3, absent=1)
    for number in range(4):
        await read(world, f"text {number}").complete(ids(f"text {number}"))
    metrics = world.app.metrics
    assert scrape(metrics, "chairlift:engine_up", "engine") == {"0": 1, "1": 1, "2": 0}
    ended = scrape(metrics, "chairlift:request_success_total", "engine", "finished_reason")
    assert {key[0]: value for key, value in ended.items() if value} == {"0": 2, "1": 2}


def test_host_names_are_looked_up_and_ip_addresses_are_not():
    assert name_and_port("dns:engine:50052") == ("engine", 50052)
    assert name_and_port("engine.:50052") == ("engine.", 50052)
    assert name_and_port("dns:localhost:1") == ("localhost", 1)
    for address in ("127.0.0.1:50052", "[::1]:50052", "localhost:50052", "unix:/run/engine.sock"):
        assert name_and_port(address) is None


def test_silent_name_server_does_not_delay_the_exit(monkeypatch):
    asked, answers = threading.Event(), threading.Event()

    def wait(name, port):
        asked.set()
        answers.wait()
        return set()

    async def run():
        lookup = resolver.Resolver("engines", 1, lambda addresses: None, lambda: True)
        lookup.start()
        await asyncio.to_thread(asked.wait)
        await lookup.stop()

    monkeypatch.setattr(resolver, "_hosts_of", wait)
    at_last = threading.Timer(10, answers.set)
    at_last.start()
    asyncio.run(run())
    was_delayed = answers.is_set()
    at_last.cancel()
    answers.set()
    assert not was_delayed


class Names:
    """A name server for one name."""

    def __init__(self):
        self.hosts = []
        self.flaps = []  # answers before `hosts`
        self.num_asked = 0

    def look_up(self, host, port):
        assert host == "engines"
        self.num_asked += 1
        hosts = self.flaps.pop(0) if self.flaps else self.hosts
        if not hosts:
            raise OSError("no such name")
        return set(hosts)


@pytest.fixture
async def names(monkeypatch):
    names = Names()
    monkeypatch.setattr(resolver, "_hosts_of", names.look_up)
    monkeypatch.setattr(resolver, "_EVERY_S", 0.01)
    monkeypatch.setattr(resolver, "_EVERY_WHILE_NONE_S", 0.01)
    return names


async def test_lookups_go_on_after_one_that_got_no_thread(make_world, read, ids, names, caplog, monkeypatch):
    in_thread, failures = resolver._in_thread, [RuntimeError("can't start new thread")]

    async def scarce(look_up):
        if failures:
            raise failures.pop()
        return await in_thread(look_up)

    monkeypatch.setattr(resolver, "_in_thread", scarce)
    engine = FakeEngine(address="127.0.0.1:0")
    names.hosts = ["127.0.0.1"]
    world = await make_world(0, engine=(f"dns:engines:{(await engine.start()).rpartition(':')[2]}",))
    await world.until_usable(1)
    await read(world, "abc").complete(ids("abc"))
    assert len([one for one in caplog.records if "the lookup of engines failed" in one.message]) == 1
    await world.app.stop()
    await engine.kill()


async def test_name_resolves_to_all_its_addresses_as_they_change(make_world, read, ids, names, caplog, scrape):
    """Three addresses of this machine with the same port, of which the last one refuses connections."""
    first = FakeEngine(address="127.0.0.1:0")
    port = (await first.start()).rpartition(":")[2]
    second = FakeEngine(address=f"127.0.0.2:{port}")
    await second.start()
    caplog.set_level(logging.INFO)
    world = await make_world(0, engine=(f"dns:engines:{port}",))
    assert world.app.engines._connections == {}
    names.hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    await world.until_usable(2)
    for number in range(4):
        await read(world, f"text {number}").complete(ids(f"text {number}"))
    assert (len(first.submissions), len(second.submissions)) == (2, 2)
    await world.until(lambda: len(world.app.engines._connections) == 3)
    assert not [record for record in caplog.records if "no engine at" in record.message]

    second.pause()
    held = [read(world, "held"), read(world, "held")]  # one for each engine
    await second.wait_for(lambda: second.num_open == 1)
    names.hosts = ["127.0.0.1"]
    await world.until_usable(1)
    assert second.num_sessions == 1  # it has an open request
    assert f"127.0.0.3:{port}" not in world.app.engines._connections
    second.resume()
    for reading in held:
        await reading.complete(ids("held"))
    await second.wait_for(lambda: second.num_sessions == 0)
    assert scrape(world.app.metrics, "chairlift:engine_up", "engine") == {"0": 1}

    vanished = f"removed engine 127.0.0.2:{port}: its address is no longer in DNS"
    assert caplog.messages.count(vanished) == 1
    names.flaps = [
        ["127.0.0.1", "127.0.0.2"],
        ["127.0.0.1"],
        ["127.0.0.1"],
    ] * 4  # three chances
    await world.until(lambda: not names.flaps and f"127.0.0.2:{port}" not in world.app.engines._connections)
    assert caplog.messages.count(vanished) == 2

    names.hosts = []  # the name server fails, but the engine serves
    asked = names.num_asked
    await world.until(lambda: names.num_asked > asked + 2)
    await read(world, "abc").complete(ids("abc"))
    names.hosts = ["127.0.0.1", "127.0.0.2"]
    await world.until_usable(2)
    assert set(scrape(world.app.metrics, "chairlift:engine_up", "engine")) == {"0", "1"}
    for engine in (first, second):
        await engine.wait_for(lambda engine=engine: engine.num_open == 0)
    await world.app.stop()
    await first.kill()
    await second.kill()


async def test_engine_that_only_finishes_its_requests_is_not_called_serving(make_world, read, ids, names):
    engine = paused_engine(address="127.0.0.1:0")
    port = (await engine.start()).rpartition(":")[2]
    world = await make_world(0, engine=(f"dns:engines:{port}",))
    names.hosts = ["127.0.0.1"]
    await world.until_usable(1)
    held = read(world, "held")
    await engine.wait_for(lambda: engine.num_open == 1)
    names.hosts = ["127.0.0.3"]  # nobody listens there
    await world.until_usable(0)
    refused = await read(world, "abc").end()
    assert refused.error.details() == "no engine is attached"
    engine.resume()
    await held.complete(ids("held"))
    await world.app.stop()
    await engine.kill()
