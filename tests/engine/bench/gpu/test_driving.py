"""A tiny engine driven step by step: decode batches, prefills, windows."""

import itertools
import statistics
import time
from types import SimpleNamespace

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.shapes import write_shape
from chairlift.bench.workload import Workload
from engine.bench.floor import Length
from engine.bench.fresh_scheduler import schedule_anew, serve_anew
from engine.bench.gpu.decode_steps import DecodePoint, Decoding, prefill_seconds
from engine.bench.gpu.driver import EngineDriver, RequestMaker, greedy_answers, new_request
from engine.bench.gpu.window import continuous_window, static_window
from engine.bench.serve import engine
from engine.config import EngineConfig
from engine.serving.parts import EngineParts

_STEP_TOKENS = 32


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    return engine(
        EngineConfig(
            model=str(write_shape("tiny", tmp_path_factory.mktemp("shape"))),
            load_format="dummy",
            max_num_seqs=4,
            max_num_batched_tokens=_STEP_TOKENS,
            max_model_len=128,
            enable_prefix_caching=False,
            device="cpu",
            async_scheduling=True,
            threads=1,
        )
    )


@pytest.fixture
def driver(parts: EngineParts) -> EngineDriver:
    return EngineDriver(schedule_anew(parts))


@pytest.fixture
def maker() -> RequestMaker:
    return RequestMaker(512)


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which each step takes 10 ms."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.01 * next(ticks), monotonic=time.monotonic)
    monkeypatch.setattr("engine.bench.gpu.driver.time", clock)


def test_answers_are_those_of_the_engine(parts: EngineParts) -> None:
    workload = Workload((tuple(range(1, 20)), tuple(range(5, 90))), (9, 9))
    assert greedy_answers(parts, workload) == serve_anew(parts, workload).output_ids


def test_rejected_request_is_an_error(driver: EngineDriver) -> None:
    driver.submit([new_request((1,) * 200, 1)])
    with pytest.raises(BenchmarkError, match="rejected"):
        driver.turn()


@pytest.mark.parametrize("batch", [1, 4])
def test_decode_point_has_its_context(driver: EngineDriver, maker: RequestMaker, batch: int) -> None:
    point = DecodePoint(batch, context=60, num_steps=8)
    with Decoding(driver, maker, point, _STEP_TOKENS) as decoding:
        timed = decoding.steps(8)
    assert len(timed.step_s) == 8
    assert min(timed.step_s) > 0
    assert timed.mean_context == pytest.approx(60, abs=4)
    assert driver.num_open == 0


def test_one_request_of_a_decode_point_may_be_longer(driver: EngineDriver, maker: RequestMaker) -> None:
    point = DecodePoint(4, context=30, num_steps=4, longest=90)
    with Decoding(driver, maker, point, _STEP_TOKENS) as decoding:
        timed = decoding.steps(4)
    assert timed.mean_context == pytest.approx(45, abs=4)


def test_decode_points_share_one_runner(parts: EngineParts, maker: RequestMaker) -> None:
    for _ in range(4):  # requests that were cancelled must not keep the runner's rows
        with Decoding(EngineDriver(schedule_anew(parts)), maker, DecodePoint(4, 40, 2), _STEP_TOKENS) as decoding:
            decoding.steps(2)


@pytest.mark.usefixtures("step_clock")
def test_prefills_are_timed_between_full_steps(driver: EngineDriver, maker: RequestMaker) -> None:
    """Six prompts of 24 tokens take five steps of 32; the first one ends in the first step."""
    assert prefill_seconds(driver, maker, prompt_len=24, num_prompts=6) == pytest.approx(0.01 * 4 / 5)
    with pytest.raises(BenchmarkError, match="at least two are required"):
        prefill_seconds(driver, maker, prompt_len=4, num_prompts=2)


@pytest.mark.usefixtures("step_clock")
def test_a_continuous_window_keeps_its_slots(driver: EngineDriver, maker: RequestMaker) -> None:
    window = continuous_window(driver, maker, [Length(10, 12), Length(30, 3)], num_slots=4, seconds=2.0)
    assert window.seconds == pytest.approx(2.0)
    assert window.num_tokens > window.num_finished > 0
    assert window.mean_running == pytest.approx(4, abs=0.3)
    assert len(window.step_s) == len(window.step_tokens)
    assert sum(window.step_s) == pytest.approx(window.seconds)
    assert driver.num_open == 0


@pytest.mark.usefixtures("step_clock")
def test_a_static_window_is_whole_batches(parts: EngineParts, maker: RequestMaker) -> None:
    driver = EngineDriver(schedule_anew(parts, policy="static"))
    window = static_window(driver, maker, [Length(5, 2), Length(5, 2), Length(5, 2), Length(5, 40)], 4, seconds=0.1)
    assert window.num_finished % 4 == 0
    assert window.num_tokens == window.num_finished // 4 * 46
    assert statistics.median(window.step_tokens) == 1  # three slots wait for the fourth


def test_requests_are_random_and_repeatable() -> None:
    first, second = (RequestMaker(512, seed=3).make(Length(7, 2)) for _ in range(2))
    assert first.prompt_ids == second.prompt_ids
    assert first.request_id != second.request_id
    assert all(0 < token_id < 512 for token_id in first.prompt_ids)
