"""`--batch-invariant` on a GPU, with kernels under Triton's interpreter: the same logits and tokens as served alone."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.request import Request, RequestId, SamplingParams
from engine.serving.parts import EngineParts
from engine.startup.build import build_engine
from engine.startup.gpu import Gpu
from engine.startup.gpu_memory import GpuMemory
from engine.startup.progress import StartupProgress
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS
from tests.support.engine.invariance import LogitsRecorder, Served, assert_same_bits, serve
from tests.support.kernels.interpreter import patch_language_once_per_launch, sum_products_in_order

if torch.cuda.is_available():
    pytest.skip("a real GPU is there: make gpu-check STAGE=invariance", allow_module_level=True)

PROMPT_LENS, OUTPUT_LENS = (1, 31, 15, 43), (3, 4, 3, 3)
NUM_SHARED_TOKENS = 20  # of the longer prompts
SCENARIOS: dict[str, dict[str, Any]] = {
    "budget of 13": {"max_num_batched_tokens": 13},
    "preempted": {"num_gpu_blocks_override": 4, "max_model_len": 64},
    "prefix-cached": {"enable_prefix_caching": True},
}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16, window": ("mistral", {"dtype": "bfloat16"}),
    "fp32, fp8 cache": ("llama", {"dtype": "float32", "kv_cache_dtype": "fp8"}),
    "fp8 weights": ("llama", {"dtype": "bfloat16", "quantization": "fp8"}),
}


class Case:
    """A checkpoint in one mode, and the answers and logits of its requests served one after the other."""

    def __init__(self, path: Path, **mode: Any) -> None:
        self.recorder = LogitsRecorder()
        self._path, self._mode = path, mode
        parts = self._build()
        self.answers = [serve(parts, [request], [0]).answers[0] for request in make_requests()]
        self.bits = self.recorder.take()

    def _build(self, **fields: Any) -> EngineParts:
        made: list[GpuOps] = []

        initialise = GpuOps.__init__

        def initialise_noted(ops: GpuOps, *args: Any, **kwargs: Any) -> None:
            initialise(ops, *args, **kwargs)
            made.append(ops)

        config = EngineConfig(
            model=str(self._path),
            device="cuda",
            batch_invariant=True,
            enforce_eager=True,
            **{
                "max_num_seqs": 4,
                "max_num_batched_tokens": 256,
                "max_model_len": 64,
                "num_gpu_blocks_override": 64,
                "enable_prefix_caching": False,
                "async_scheduling": False,
                "kernel_check": "off",  # interpreted, it takes longer than the answers
                **self._mode,
                **fields,
            },
        )
        memory = GpuMemory("fake", 1 << 62, 1 << 62, 1.0)
        gpu = Gpu(torch.device("cpu"), TARGETS["sm_90"], num_processors=4, memory=memory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GpuOps, "__init__", initialise_noted)
            parts = build_engine(config, StartupProgress(), gpu=gpu)
        made[0].sample = self.recorder.listen(made[0].sample)  # type: ignore[assignment]
        return parts

    def check(self, fields: dict[str, Any]) -> Served:
        """Serves all requests with overlapping steps and compares them with the answers alone."""
        served = serve(self._build(**fields), make_requests(), [0, 0, 0, 2])
        assert assert_same_bits(self.recorder.take(), self.bits) == sum(OUTPUT_LENS)
        assert [answer.token_ids for answer in served.answers] == [answer.token_ids for answer in self.answers]
        return served


def make_requests() -> list[Request]:
    """Every second one greedy, the others at temperature 0.8."""
    rng = random.Random(1)
    shared = [rng.randrange(3, 200) for _ in range(NUM_SHARED_TOKENS)]
    requests = []
    for index, (prompt_len, output_len) in enumerate(zip(PROMPT_LENS, OUTPUT_LENS, strict=True)):
        own = [rng.randrange(3, 200) for _ in range(prompt_len)]
        prompt_ids = own if prompt_len < NUM_SHARED_TOKENS else [*shared, *own[NUM_SHARED_TOKENS:]]
        params = SamplingParams(
            seed=index, max_tokens=output_len, temperature=0.8 if index % 2 else 0.0, ignore_end_token=True
        )
        requests.append(Request(RequestId(1 + index), tuple(prompt_ids), params, arrival_s=0.0))
    return requests


@pytest.fixture(scope="module", params=MODES)
def case(request: pytest.FixtureRequest, servable: Callable[..., Path]) -> Iterator[Case]:
    patch_language_once_per_launch()
    architecture, mode = MODES[request.param]
    overrides = {"sliding_window": 24} if architecture == "mistral" else {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        sum_products_in_order(monkeypatch)
        yield Case(servable(architecture, num_hidden_layers=1, max_position_embeddings=64, **overrides), **mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_logits_and_tokens_are_the_same_bits_as_alone(case: Case, name: str) -> None:
    served = case.check(SCENARIOS[name])
    assert (served.num_preemptions > 0) == ("preempted" in name)
    assert (served.num_cached_tokens > 0) == ("prefix-cached" in name)
    widths = [[row.num_scheduled_tokens for row in plan.rows] for plan in served.plans]
    assert any(1 in step and max(step) > 1 for step in widths)  # prompts and decodes in one step
