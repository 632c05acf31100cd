"""A real Prometheus, with the configuration of deploy/monitoring, on a real frontend that asks for a key."""

import asyncio
import json
import math
import shutil
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from loadgen.processes import held_port
from tests.hang import HANG_S
from tests.support.frontend.fake_engine import FakeEngine

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus, a package of Debian's")

KEY = "0123456789abcdef"
Ask = Callable[..., Any]


@pytest.fixture
async def frontend() -> AsyncIterator[FrontendApp]:
    """A frontend with traffic, on an engine whose totals grow and one that dies again and again with what it has."""
    engine, mortal = FakeEngine(heartbeat_s=0.05), FakeEngine(heartbeat_s=0.05)
    engine.load = engine_pb.LoadStats(step_us=2000, execute_us=1500, num_batched_tokens=8, num_free_blocks=100)
    addresses = (await engine.start(), await mortal.start())
    app = FrontendApp(FrontendConfig(port=0, http_port=0, engine=addresses, api_key=(KEY,)))
    await app.start()
    await app.wait_serving(HANG_S)

    async def talk() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
            call = GenerationServiceStub(channel).Generate
            while True:
                request = pb.GenerateRequest(spec=pb.GenerationSpec(text="abc"))
                await call(request, metadata=[("authorization", f"Bearer {KEY}")])
                assert engine.load is not None
                for total in ("prefix_cache_queries", "prefix_cache_hits", "num_generated_tokens"):
                    name = f"{total}_total"
                    setattr(engine.load, name, getattr(engine.load, name) + 4)

    async def die() -> None:
        nonlocal mortal
        while not is_over.is_set():
            mortal.pause()
            await mortal.wait_for(lambda engine=mortal: engine.num_open > 0)
            await mortal.kill()
            mortal = FakeEngine(address=addresses[1], heartbeat_s=0.05)
            await mortal.start()

    is_over = asyncio.Event()
    tasks = [asyncio.create_task(task()) for task in (die, talk, talk, talk)]
    yield app
    is_over.set()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # not cancelled: its engine may be half stopped
    for task in tasks:
        task.cancel()
    died, *talked = await asyncio.gather(*tasks, return_exceptions=True)
    await app.stop()
    await asyncio.gather(engine.kill(), mortal.kill())
    assert died is None
    assert all(isinstance(result, asyncio.CancelledError) for result in talked), talked


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture
async def prometheus(frontend: FrontendApp, monitoring: Path, tmp_path: Path, port: int) -> AsyncIterator[Ask]:
    """ask(path, **parameters): the data of Prometheus' answer."""
    config = yaml.safe_load((monitoring / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]  # names of containers; the rest is as it is
    job["static_configs"] = [{"targets": [f"127.0.0.1:{frontend.http_port}"]}]
    job["authorization"]["credentials_file"] = "api-key"
    (tmp_path / "api-key").write_text(KEY)
    (tmp_path / "alerts.yml").write_text((monitoring / "prometheus" / "alerts.yml").read_text())
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus", "--config.file=prometheus.yml", f"--web.listen-address={address}", "--storage.tsdb.path=data",
            cwd=tmp_path, stdout=log, stderr=log,
        )  # fmt: skip

    def read(path: str, parameters: dict[str, str]) -> Any:
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=HANG_S) as answer:
            return json.load(answer)["data"]

    async def ask(path: str, **parameters: str) -> Any:
        return await asyncio.to_thread(read, path, parameters)

    async def is_up() -> bool:
        try:
            targets = (await ask("targets"))["activeTargets"]
        except OSError:
            return False
        return [target["health"] for target in targets] == ["up"]

    try:
        await until(is_up, lambda: (tmp_path / "log").read_text())
        yield ask
    finally:
        process.terminate()
        await process.wait()


async def until(is_so: Callable[[], Any], why_not: Callable[[], str]) -> None:
    """Waits for something of another process, which can only be asked again and again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + HANG_S
    while not await is_so():
        assert loop.time() < deadline, why_not()
        await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_every_panel_has_data(prometheus: Ask, monitoring: Path) -> None:
    dashboard = json.loads((monitoring / "grafana" / "dashboards" / "chairlift.json").read_text())
    variables = {"$__rate_interval": "5s", "$model": "(fake)", "$engine": "(0|1)"}
    (instance,) = await prometheus("label/instance/values", **{"match[]": "chairlift:engine_up"})
    missing = {target["expr"]: panel for panel in dashboard["panels"] for target in panel.get("targets", ())}

    async def ask_again() -> bool:
        for query in list(missing):
            text = query.replace("$frontend", instance)
            for variable, value in variables.items():
                text = text.replace(variable, value)
            samples = (await prometheus("query", query=text))["result"]
            if any(math.isfinite(float(sample["value"][1])) for sample in samples):
                del missing[query]
        return not missing

    await until(ask_again, lambda: "\n".join(missing))


@pytest.mark.slow
async def test_alerts_are_evaluated_and_only_those_on_lost_engines_wait_to_fire(prometheus: Ask) -> None:
    states: dict[str, tuple[str, str]] = {}

    async def are_as_expected() -> bool:
        (group,) = (await prometheus("rules"))["groups"]
        states.update({rule["name"]: (rule["health"], rule["state"]) for rule in group["rules"]})
        states.pop("ChairliftEngineFlapping", None)  # it is away for less than a tenth of the time, or for more
        waiting = states.pop("ChairliftEngineLoss", None)
        return waiting == ("ok", "pending") and set(states.values()) == {("ok", "inactive")}

    await until(are_as_expected, lambda: str(states))
