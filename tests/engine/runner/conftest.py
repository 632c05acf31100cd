"""Runs the scheduler and the real runner on tiny checkpoints; greedy answers of `transformers` are the reference."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from engine.constraints.constraint import Constraint
from engine.core.config import SchedulerConfig
from engine.core.outputs import SchedulerOutput
from engine.core.request import Adapter, Request, RequestId, SamplingParams
from engine.core.schedulers import make_scheduler
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from engine.parallel.group import SINGLE_RANK, ParallelGroup
from engine.runner.kv_cache import KVCachePlan, plan_kv_cache
from engine.runner.model_runner import RunnerOptions, TorchModelRunner
from engine.runner.stream import Stream
from engine.startup.served_model import shard_shape
from kernels.families import cpu_ops, reference_ops
from kernels.interface import KernelOps
from tests.support.engine.answer_ledger import Answer, AnswerLedger
from tests.support.engine.families import FAMILIES, auto_class, family_config, save_family

NEAR_TIE = 1e-4


@dataclass
class Prompt:
    """A template of a request; every run needs a fresh `Request`."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()
    constraint: Callable[[], Constraint] | None = None
    adapter: Adapter | None = None


@dataclass
class Run:
    """The answers of a run, and how they were computed."""

    answers: list[Answer]
    plans: list[SchedulerOutput] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class TinyEngine:
    """One model; every `serve` uses a new scheduler, runner and cache."""

    def __init__(
        self,
        path: Path,
        ops: KernelOps,
        device: torch.device | None = None,
        group: ParallelGroup = SINGLE_RANK,
    ) -> None:
        self.config = ModelConfig.from_dir(path)
        self.ops = ops
        self.model: Decoder = load_model(path, self.config, ops, device=device, group=group)
        self._shape = shard_shape(self.config, group)

    def runner(self, kv_plan: KVCachePlan, **config: Any) -> TorchModelRunner:
        """A runner with a cache of its own."""
        return TorchModelRunner(self.model, self._shape, kv_plan, self.ops, RunnerOptions(**config))

    def serve(
        self,
        prompts: Sequence[Prompt],
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        max_steps_in_flight: int = 1,
        stream: Stream | None = None,
        decode_buckets: Sequence[int] = (),
        mixed_buckets: Sequence[int] = (),
        num_snapshots: int = 0,
        **config: Any,
    ) -> Run:
        """Submits all prompts at once and runs steps until all have ended; checks the invariants after every step."""
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_steps_in_flight": max_steps_in_flight,
        }
        kv_plan = plan_kv_cache(self._shape, torch.float32, block_size, 0, None, num_blocks_override=num_blocks)
        kv_plan = replace(kv_plan, num_snapshots=num_snapshots)
        runner = self.runner(
            kv_plan,
            stream=stream,
            decode_buckets=decode_buckets,
            mixed_buckets=mixed_buckets,
            has_adapters=any(prompt.adapter is not None for prompt in prompts),
            **limits,
        )
        scheduler = make_scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=kv_plan.max_model_len,
                end_token_ids=self.config.shape.end_token_ids,
                num_state_snapshots=num_snapshots or None,
                **limits,
                **config,
            )
        )
        ledger, run = AnswerLedger(), Run([])
        for index, prompt in enumerate(prompts):
            request = Request(
                RequestId(index + 1),
                prompt.prompt_ids,
                prompt.params,
                0.0,
                output_ids=list(prompt.output_ids),
                constraint=prompt.constraint() if prompt.constraint is not None else None,
                adapter=prompt.adapter,
            )
            scheduler.add_request(request)
            ledger.expect(request)
        in_flight: deque[SchedulerOutput] = deque()
        while scheduler.has_work() or in_flight:
            if scheduler.has_work():
                plan = scheduler.schedule(float(len(run.plans)))
                runner.launch(plan)
                in_flight.append(plan)
                run.plans.append(plan)
            if len(in_flight) == max_steps_in_flight or not scheduler.has_work():
                ledger.record(scheduler.update(in_flight.popleft(), runner.collect(), float(len(run.plans))))
            scheduler.check_integrity()
        stats = scheduler.stats()
        run.num_preemptions = stats.num_preemptions_total
        run.num_cached_tokens = stats.prefix_cache_hits_total
        run.num_accepted_tokens, run.num_draft_tokens = stats.num_accepted_tokens_total, stats.num_draft_tokens_total
        run.answers = [ledger.answers[RequestId(index + 1)] for index in range(len(prompts))]
        assert all(answer.completion is not None for answer in run.answers)
        return run


class TransformersEngine(TinyEngine):
    """A model that transformers computes."""

    def __init__(
        self,
        path: Path,
        ops: KernelOps,
        *,
        max_model_len: int = 256,
        weights_dtype: torch.dtype | None = None,
        may_keep_latents: bool = True,
    ) -> None:
        from engine.model.transformers_model import TransformersModel
        from engine.model.transformers_probe import TransformersConfig

        self.config = TransformersConfig.from_dir(path, may_keep_latents=may_keep_latents)
        self._shape = self.config.shape
        self.ops = ops
        self.model = TransformersModel(
            self.config,
            ops,
            dtype=torch.float32,
            weights_dtype=weights_dtype,
            device=torch.device("cpu"),
            max_model_len=max_model_len,
        )


@dataclass(frozen=True)
class GreedyCheck:
    """How an answer compares with the model's own choice at each of its positions.

    Attributes:
        num_tokens: positions compared.
        num_near_ties: of these, positions where the reference's two best logits are less than NEAR_TIE apart.
        num_differences: positions where the answer has another token than the reference; all of them near-ties.
    """

    num_tokens: int
    num_near_ties: int
    num_differences: int


class HfReference:
    """The same checkpoint in `transformers`."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.model = (
            auto_class(transformers.AutoConfig.from_pretrained(path))
            .from_pretrained(path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
            .eval()
        )

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy continuation of exactly this length."""
        out = self.model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt_ids) :].tolist()

    @torch.inference_mode()
    def check_greedy(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], best_ids: Sequence[int] | None = None
    ) -> GreedyCheck:
        """Compares the best token at each position with the reference's after the same tokens.

        One forward over prompt and answer, so that every position is judged on its own: differences do not cascade.

        Args:
            prompt_ids: the prompt.
            output_ids: the answer.
            best_ids: the best token at each position of the answer; None is the answer itself, if it is greedy.
        """
        ids = torch.tensor([[*prompt_ids, *output_ids]])
        logits = self.model(ids).logits[0, len(prompt_ids) - 1 : -1]
        best = logits.topk(2)
        gaps = best.values[:, 0] - best.values[:, 1]
        differs = best.indices[:, 0] != torch.tensor(output_ids if best_ids is None else best_ids)
        wrong = differs & (gaps >= NEAR_TIE)
        assert not wrong.any(), f"other tokens at {wrong.nonzero().flatten().tolist()}, gaps {gaps[wrong].tolist()}"
        return GreedyCheck(len(output_ids), int((gaps < NEAR_TIE).sum()), int(differs.sum()))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Matrices this small gain nothing from a second thread, and on a busy machine every operation waits for it."""
    num_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads[0])
    numba.set_num_threads(num_threads[1])


@pytest.fixture(scope="session")
def prompt() -> Callable[..., Prompt]:
    """prompt(prompt_ids, params, output_ids=(), constraint=None, adapter=None) -> Prompt."""
    return lambda prompt_ids, params, *args, **kwargs: Prompt(tuple(prompt_ids), params, *args, **kwargs)


@pytest.fixture(scope="session")
def engine_on() -> Callable[..., TinyEngine]:
    """engine_on(checkpoint folder, ops, device=None, group=SINGLE_RANK) -> TinyEngine."""
    return TinyEngine


@pytest.fixture(scope="session")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_family(name, **fields) -> folder of a checkpoint in float32, in a new folder of its own."""

    def make(name: str, **fields: Any) -> Path:
        prefix, own = FAMILIES[name]
        path = tmp_path_factory.mktemp("family") / prefix
        save_family(path, family_config(prefix, **{**own, **fields}))
        return path

    return make


@pytest.fixture(scope="session")
def transformers_on() -> Callable[..., TransformersEngine]:
    """transformers_on(checkpoint folder, ops, max_model_len=256, ...) -> TransformersEngine."""
    return TransformersEngine


@pytest.fixture(scope="session")
def reference_of() -> Callable[[Path], HfReference]:
    """reference_of(checkpoint folder) -> HfReference."""
    return HfReference


@pytest.fixture(scope="session", params=["reference", "cpu"])
def ops(request) -> KernelOps:
    return {"reference": reference_ops, "cpu": cpu_ops}[request.param]()


@pytest.fixture(scope="session")
def tiny_engine(make_checkpoint, ops) -> Callable[..., TinyEngine]:
    """tiny_engine(architecture, **overrides as of make_checkpoint) -> TinyEngine."""
    engines: dict[Path, TinyEngine] = {}

    def make(architecture: str, **overrides: Any) -> TinyEngine:
        path = make_checkpoint(architecture, **overrides)
        if path not in engines:
            engines[path] = TinyEngine(path, ops)
        return engines[path]

    return make


@pytest.fixture(scope="session")
def hf_reference(make_checkpoint) -> Callable[..., HfReference]:
    """hf_reference(architecture, **overrides as of make_checkpoint) -> HfReference."""
    references: dict[Path, HfReference] = {}

    def make(architecture: str, **overrides: Any) -> HfReference:
        path = make_checkpoint(architecture, **overrides)
        if path not in references:
            references[path] = HfReference(path)
        return references[path]

    return make
