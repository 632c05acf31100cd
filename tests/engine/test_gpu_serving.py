"""Whole engines serve on a GPU: on a real one where there is one, else on a simulated one (marked slow).

Greedy answers in bfloat16 are compared between steps of equal shapes only, whose sums have the same order. Where
batches differ, the model computes in float32, in which near-ties do not occur.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.constraints.constraint import Constraint
from engine.constraints.token_bits import Words, words_of
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.serving.parts import EngineParts
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from tests.support.engine.simulated_gpu import FakeGraphs, simulate_gpu

VOCAB_SIZE = 211
NUM_TOKENS = 4
LARGE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_hidden_layers": 4}
SMALL = {"num_hidden_layers": 1}
GREEDY = SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0, ignore_end_token=True)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("simulated", marks=pytest.mark.slow)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kind of GPU on which engines are built."""
    if request.param == "simulated":
        if torch.cuda.is_available():
            pytest.skip("kernels are not interpreted beside a GPU: hide it with CUDA_VISIBLE_DEVICES=")
        simulate_gpu(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    yield request.param
    if request.param == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def build(gpu: str, servable: Callable[..., Path]) -> Callable[..., EngineParts]:
    """build(**fields) -> an engine on the GPU, with a small model and a cache of 64 blocks."""
    model_dir = servable(dtype="float32", **(LARGE if gpu == "cuda" else SMALL))

    def make(**fields: object) -> EngineParts:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "num_gpu_blocks_override": 64}
        # the interpreter takes seconds for the check
        settings = sizes | {"dtype": "bfloat16", "kernel_check": "fail" if gpu == "cuda" else "off"} | fields
        config = EngineConfig(model=str(model_dir), device="cuda", **settings)  # type: ignore[arg-type]
        return build_engine(config, StartupProgress())

    return make


def requests(params: SamplingParams = GREEDY, number: int = 4, num_prompt_tokens: int = 9) -> list[Request]:
    """Requests with prompts of equal lengths, which fit into one step together."""
    return [
        Request(
            RequestId(1 + index),
            tuple((7 * index + 3 * position) % VOCAB_SIZE for position in range(num_prompt_tokens)),
            params,
            arrival_s=0.0,
        )
        for index in range(number)
    ]


def serve(parts: EngineParts, of: Sequence[Request], *, num_steps: int | None = None) -> list[tuple[int, ...]]:
    """Returns the tokens of each request, of the first steps or of all."""
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in of}
    for request in of:
        parts.scheduler.add_request(request)
    in_flight: deque[SchedulerOutput] = deque()
    while in_flight or (parts.scheduler.has_work() and num_steps != 0):
        if parts.scheduler.has_work() and num_steps != 0:
            in_flight.append(parts.scheduler.schedule(0.0))
            parts.runner.launch(in_flight[-1])
            num_steps = None if num_steps is None else num_steps - 1
        if len(in_flight) == parts.scheduler.max_steps_in_flight or not parts.scheduler.has_work() or num_steps == 0:
            for output in parts.scheduler.update(in_flight.popleft(), parts.runner.collect(), 0.0):
                tokens[output.request_id] += output.token_ids
    return [tuple(answer) for answer in tokens.values()]


@contextmanager
def no_waits(gpu: str) -> Iterator[None]:
    """Makes torch raise an error where the host waits for the device, except for events."""
    if gpu != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_answers_are_the_same_eager_with_graphs_and_with_two_steps_in_flight(
    gpu: str, build: Callable[..., EngineParts]
) -> None:
    of_64_tokens = partial(requests, num_prompt_tokens=16)  # a size that is recorded, so that no step is padded
    expected = serve(build(enforce_eager=True, async_scheduling=False), of_64_tokens())
    assert [len(answer) for answer in expected] == [NUM_TOKENS] * 4
    assert len(set(expected)) == 4
    assert not FakeGraphs.seen
    for fields in ({"async_scheduling": False}, {"async_scheduling": True}):
        parts = build(**fields)
        assert parts.scheduler.max_steps_in_flight == 1 + fields["async_scheduling"]
        assert serve(parts, of_64_tokens()) == expected
        assert gpu == "cuda" or 4 in FakeGraphs.seen


def test_the_step_loop_does_not_wait_for_the_device(gpu: str, build: Callable[..., EngineParts]) -> None:
    everything = SamplingParams(
        seed=1, max_tokens=NUM_TOKENS, temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=1.1, top_logprobs=2
    )
    parts = build()
    of = [*requests(number=2), *requests(everything)[2:]]
    of[1].constraint = Constraint(VOCAB_SIZE, allowed_ids=range(50))
    with no_waits(gpu):
        answers = serve(parts, of)
    assert all(answers)
    assert parts.num_late_compiles() == 0


class Ascending:
    """A grammar whose tokens ascend: each may be one to three above the last one."""

    error = ""

    def __init__(self) -> None:
        self._last = 0

    def accept(self, token_ids: Sequence[int]) -> None:
        """Remembers the last token."""
        self._last = token_ids[-1]

    def fill(self, words: Words) -> None:
        """Allows the next three tokens."""
        words[:] = words_of(range(self._last + 1, self._last + 4), VOCAB_SIZE)


def test_structured_output_is_valid_and_the_same_with_one_and_two_steps_in_flight(
    build: Callable[..., EngineParts],
) -> None:
    answers = []
    for async_scheduling in (False, True):
        of = requests()
        for request in of[:2]:
            request.constraint = Constraint(VOCAB_SIZE, matcher=Ascending())
        answers.append(serve(build(async_scheduling=async_scheduling), of))
        for answer in answers[-1][:2]:
            assert len(answer) == NUM_TOKENS
            assert all(1 <= token - last <= 3 for last, token in zip((0, *answer), answer, strict=False))
    assert answers[0] == answers[1]


def test_preempted_requests_get_the_same_answers(build: Callable[..., EngineParts]) -> None:
    params = SamplingParams(seed=3, max_tokens=10, temperature=0.7, ignore_end_token=True)
    expected = serve(build(dtype="float32"), requests(params, number=3))
    parts = build(dtype="float32", num_gpu_blocks_override=4, enable_prefix_caching=False)
    of = requests(params, number=3)
    assert serve(parts, of) == expected
    assert sum(request.num_preemptions for request in of) > 0
    parts.scheduler.check_integrity()


def test_another_engine_on_the_device_continues_the_answers(build: Callable[..., EngineParts]) -> None:
    params = SamplingParams(seed=5, max_tokens=6, temperature=0.7, ignore_end_token=True)
    first, second = build(dtype="float32"), build(dtype="float32")
    expected = serve(second, requests(params, number=3))
    so_far = serve(first, requests(params, number=3), num_steps=3)
    assert all(1 <= len(tokens) < 6 for tokens in so_far)
    continued = [
        Request(RequestId(10 + index), request.prompt_ids, params, 0.0, output_ids=list(tokens), has_moved=True)
        for index, (request, tokens) in enumerate(zip(requests(params, number=3), so_far, strict=True))
    ]
    rest = serve(second, continued)
    assert [tokens + more for tokens, more in zip(so_far, rest, strict=True)] == expected


@pytest.mark.parametrize("fields", [{"kernels": "torch"}, {"attention_backend": "torch"}])
def test_torch_kernels_and_torch_attention_give_the_same_answers(
    build: Callable[..., EngineParts], fields: dict[str, str]
) -> None:
    answers = []
    for each in ({}, fields):
        of = [*requests(number=2), *requests(num_prompt_tokens=21)[2:]]  # the second prompts end in another step
        answers.append(serve(build(dtype="float32", max_num_batched_tokens=32, **each), of))
    assert answers[0] == answers[1]
