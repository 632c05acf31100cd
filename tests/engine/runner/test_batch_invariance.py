"""With `batch_invariant`, logits and tokens of a request are the same bits for any division into steps and any batch.

Over 100,000 positions are compared.

Each case is served once alone, request after request, and then in every scenario with random arrivals.
"""

import functools
import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch

from engine.config import EngineConfig
from engine.core.request import Request, RequestId, SamplingParams
from engine.startup.build import build_engine
from engine.startup.machine import usable_cpus
from engine.startup.progress import StartupProgress
from kernels.cpu.ops import CpuOps
from kernels.cpu.threads import set_num_threads
from kernels.families import cpu_ops
from tests.support.engine.invariance import LogitsRecorder, assert_same_bits, serve

MODELS = {
    "no GQA, odd sizes": (
        "llama",
        {
            "hidden_size": 99,
            "intermediate_size": 173,
            "head_dim": 32,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "vocab_size": 307,
        },
    ),
    "GQA 2, window": ("mistral", {"head_dim": 32, "sliding_window": 24}),
    "windows in two of three layers": (
        "olmo3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
        },
    ),
    "GQA 3, biases, long rows": (
        "llama",
        {
            "hidden_size": 129,
            "intermediate_size": 1031,
            "head_dim": 64,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "GQA 4, norm of heads, tied": (
        "qwen3",
        {"head_dim": 64, "num_key_value_heads": 1, "num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
}
MODES = {
    "fp32": {},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int8 all": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "blocks of 32": {"block_size": 32},
    "blocks of 32, int8 KV": {"block_size": 32, "kv_cache_dtype": "int8"},
}
CASES = [
    *((model, "fp32") for model in MODELS),
    ("GQA 3, biases, long rows", "bf16"),
    ("no GQA, odd sizes", "int8"),
    ("GQA 3, biases, long rows", "int8"),
    ("GQA 2, window", "int8 KV"),
    ("GQA 3, biases, long rows", "int8 all"),
    ("GQA 4, norm of heads, tied", "int8 all"),
    ("GQA 2, window", "blocks of 32"),
    ("windows in two of three layers", "blocks of 32"),
    ("GQA 4, norm of heads, tied", "blocks of 32, int8 KV"),
]


@dataclass(frozen=True)
class Scenario:
    """How the requests of a case are served a second time.

    Attributes:
        config: fields of `EngineConfig`.
        continued: they arrive with the first half of their answers.
        scarce: there are only as many blocks as the longest of them needs.
    """

    config: dict[str, object]
    continued: bool = False
    scarce: bool = False

    @property
    def num_positions(self) -> int:
        return sum(n - n // 2 if self.continued else n for n in OUTPUT_LENS)


BASE = {"max_num_seqs": 32, "num_gpu_blocks_override": 768, "enable_prefix_caching": False, "threads": 1}
SCENARIOS = {
    "batched": Scenario({}),
    "budget of 7": Scenario({"max_num_batched_tokens": 7, "max_num_seqs": 7}),
    "budget of 13": Scenario({"max_num_batched_tokens": 13, "max_num_seqs": 13}),
    "budget of 64": Scenario({"max_num_batched_tokens": 64}),
    "preempted": Scenario({}, scarce=True),
    "prefix-cached": Scenario({"enable_prefix_caching": True}),
    "continued": Scenario({}, continued=True),
    "two threads": Scenario({"threads": 2}),
    "two threads, budget of 64": Scenario({"threads": 2, "max_num_batched_tokens": 64}),
    "preempted, prefix-cached, budget of 33": Scenario(
        {"enable_prefix_caching": True, "max_num_batched_tokens": 33}, scarce=True
    ),
    "preempted, prefix-cached, continued": Scenario({"enable_prefix_caching": True}, continued=True, scarce=True),
}


def _draw_lengths():
    """Of 32 prompts and their answers: mostly short ones, and one longer than any tile or block."""
    rng = random.Random(0)
    prompt_lens = [1, 2, 15, 16, 17, 530, *(rng.randint(3, 90) for _ in range(26))]
    return prompt_lens, [rng.randint(8, 60) for _ in prompt_lens]


PROMPT_LENS, OUTPUT_LENS = _draw_lengths()
LONGEST = max(map(sum, zip(PROMPT_LENS, OUTPUT_LENS, strict=True)))
NUM_SHARED_TOKENS = 40  # of every third prompt


def make_requests(prior_outputs):
    """Every second one greedy, the others at temperature 0.8; some report log-probabilities.

    prior_outputs: what each arrives with.
    """
    rng = random.Random(1)
    shared = [rng.randrange(3, 200) for _ in range(NUM_SHARED_TOKENS)]
    requests = []
    for index, (prompt_len, output_len, prior) in enumerate(zip(PROMPT_LENS, OUTPUT_LENS, prior_outputs, strict=True)):
        prompt_ids = [rng.randrange(3, 200) for _ in range(prompt_len)]
        if index % 3 == 0:
            prompt_ids[:NUM_SHARED_TOKENS] = shared[:prompt_len]
        params = SamplingParams(
            seed=1000 + index,
            max_tokens=output_len,
            temperature=0.8 if index % 2 else 0.0,
            ignore_end_token=True,
            top_logprobs=2 if index % 5 == 0 else None,
        )
        requests.append(Request(RequestId(1 + index), tuple(prompt_ids), params, arrival_s=0.0, output_ids=list(prior)))
    return requests


def draw_arrivals(seed):
    """Steps at which requests arrive: in random order, mostly several at once."""
    rng = random.Random(seed)
    steps = itertools.accumulate(int(rng.expovariate(1.0)) for _ in PROMPT_LENS)
    return rng.sample(list(steps), len(PROMPT_LENS))


class Case:
    """A checkpoint in one mode, and the answers to its requests served one after the other.

    Attributes:
        answers: one per request.
        bits: of the logits at every position.
    """

    def __init__(self, path, make_ops=cpu_ops, **mode):
        self.recorder = LogitsRecorder()
        self._config = EngineConfig(model=str(path), batch_invariant=True, **{**BASE, **mode})
        self._make_ops = make_ops
        parts = self.build()
        self.groups = parts.scheduler.config.cache_groups
        requests = make_requests([()] * len(PROMPT_LENS))
        self.answers = [serve(parts, [request], [0]).answers[0] for request in requests]
        self.bits = self.recorder.take()

    def build(self, **config):
        """An engine as users get it, recorded."""
        made = []

        def make_ops(*args, **kwargs):
            made.append(self._make_ops(*args, **kwargs))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.startup.rank.cpu_ops", make_ops)
            parts = build_engine(replace(self._config, **config), StartupProgress())
        made[0].sample = self.recorder.listen(made[0].sample)  # after the warm-up
        return parts

    def check(self, scenario, arrivals_seed=0):
        """Serves a scenario and compares everything with the answers alone.

        Returns: what was served, and how many positions are the same.
        """
        prior_outputs = [
            answer.token_ids[: len(answer.token_ids) // 2 if scenario.continued else 0] for answer in self.answers
        ]
        requests, config = make_requests(prior_outputs), dict(scenario.config)
        if scenario.scarce:
            config["num_gpu_blocks_override"] = self.groups.most_blocks(LONGEST, 256, self._config.block_size)
            if self.groups.num_windowed:  # seven rows do not fit in the fewest blocks
                config.setdefault("max_num_batched_tokens", 64)
        served = serve(self.build(**config), requests, draw_arrivals(arrivals_seed))
        num_positions = assert_same_bits(self.recorder.take(), self.bits)
        for got, want in zip(served.answers, self.answers, strict=True):
            assert got.token_ids == want.token_ids
            assert got.logprobs == want.logprobs[len(want.logprobs) - len(got.logprobs) :]
        return served, num_positions


@pytest.fixture(scope="module", autouse=True)
def one_thread_afterwards():
    yield
    set_num_threads(1)


@pytest.fixture(scope="module", params=CASES, ids=" in ".join)
def case(request, servable):
    model, mode = request.param
    architecture, overrides = MODELS[model]
    return Case(servable(architecture, max_position_embeddings=640, **overrides), **MODES[mode])


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCENARIOS)
def test_logits_and_tokens_are_the_same_bits_as_alone(case, name):
    scenario = SCENARIOS[name]
    if scenario.config.get("threads") == 2 and usable_cpus() < 2:
        pytest.skip("needs two cores")
    served, num_positions = case.check(scenario, arrivals_seed=name)
    assert num_positions == scenario.num_positions
    if case.groups.num_windowed and scenario.continued:
        return  # with a window, half an answer takes few blocks: what follows would need a smaller cache
    assert (served.num_preemptions >= 3) == ("preempted" in name)
    assert (served.num_cached_tokens >= 96) == ("prefix-cached" in name)
    widths = [[row.num_scheduled_tokens for row in plan.rows] for plan in served.plans]
    assert any(1 in step and max(step) > 1 for step in widths)  # prompts and decodes in one step
    assert max(map(len, widths)) >= 7


def test_over_a_hundred_thousand_positions_are_compared():
    assert len(CASES) * sum(scenario.num_positions for scenario in SCENARIOS.values()) >= 100_000


class ExactProductOps(CpuOps):
    """The CPU operations with linear layers whose sums are exact, so that their order cannot matter, up to a number of
    rows; above it PyTorch's, which are rounded.

    Inputs and weights are rounded to whole multiples of 2^-INPUT_BITS and 2^-WEIGHT_BITS. Every partial sum then is a
    whole number of 2^-(INPUT_BITS + WEIGHT_BITS), and fp64 holds those below 2^53 exactly: the result is the same bits
    whatever BLAS, instructions, threads and alignment computed it.
    """

    INPUT_BITS, WEIGHT_BITS = 16, 22

    def __init__(self, max_rows, **kwargs):
        super().__init__(**kwargs)
        self._max_rows = max_rows

    def compile_step(self, step, largest, decode_sizes=(), mixed_sizes=(), mixes_torch=False, yields_logits=True):
        """The step itself: a recording could not hold a product that is not an instruction."""
        return step

    def pack_linear(self, weight, bias, *, for_logits=False):
        return (weight.double() * 2**self.WEIGHT_BITS).round(), weight, bias

    def linear(self, x, weights):
        whole_weight, weight, bias = weights
        if len(x) > self._max_rows:
            return torch.nn.functional.linear(x, weight, bias)
        whole_x = (x.double() * 2**self.INPUT_BITS).round()
        if len(x):
            assert x.shape[1] * whole_x.abs().max() * whole_weight.abs().max() < 2**53
        product = torch.ldexp(whole_x @ whole_weight.T, torch.tensor(-self.INPUT_BITS - self.WEIGHT_BITS))
        return (product if bias is None else product + bias).float()


def test_a_product_that_rounds_differently_above_16_rows_is_detected(servable):
    """With exact products the same comparison passes. The check at start knows no such weights."""
    make_ops = functools.partial(ExactProductOps, 10_000)
    case = Case(servable(max_position_embeddings=640), make_ops, kernel_check="off")
    scenario = SCENARIOS["budget of 64"]
    assert case.check(scenario)[1] == sum(OUTPUT_LENS)
    case._make_ops = functools.partial(ExactProductOps, 16)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ positions differ; the earliest is output \d+ of seed"):
        case.check(scenario)
