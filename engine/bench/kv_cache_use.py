"""C11: waste of the paged KV cache, and the number of sequences it admits.

Claim: with blocks of 16 tokens only the end of each sequence's last block is empty. Blocks are allocated as sequences
grow, so several times as many sequences run as with memory reserved for the longest answer (PagedAttention,
arXiv:2309.06180).

Goal: at most 3 % of the slots held are empty at a mean length of 300 tokens; at least 6 times the sequences of
reserving to a maximum of 2,048.

Method: the real scheduler and KV cache manager, a cache of 64 x 2,048 tokens, no model. 6,000 requests wait; prompts of
100 to 380 tokens, answers of 1 to 180. The scheduler does not know the lengths: each request may have 2,048 tokens and
ends with an end token. The same requests run twice: paged, and with `max_preemptions=0`, with which the scheduler
reserves the maximum of each request. After the first generation of requests and while some still wait, every step
counts sequences, slots held, and tokens in them. Admitting by present need can cause preemptions: they are printed, and
so is the ratio of steps, which includes them.

Models with sliding windows run the same way with the same memory divided into groups of layers (`cache_groups.py`) and
undivided: 240 requests with prompts of 4,000 to 12,000 tokens and answers of 1 to 1,000, 8,192 tokens a step, a cache
of 16 x 16,384 tokens of all layers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.core.config import SchedulerConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.model.layer_groups import group_layers
from engine.model.model_shape import LayerShape

_BLOCK_SIZE = 16
_END_ID, _TOKEN_ID = 0, 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of one request in tokens."""

    prompt: int
    output: int


class Windows(NamedTuple):
    """Layers of a model, of which each `every`-th one has no window."""

    name: str
    num_layers: int
    every: int
    window: int


_MODELS = (
    Windows("Gemma 3 27B", 62, 6, 1024),
    Windows("gpt-oss 120B", 36, 2, 128),
    Windows("OLMo 3 32B", 64, 4, 4096),
)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Contents of the cache per counted step.

    Attributes:
        num_sequences: sequences that held blocks.
        num_slots: slots in their blocks.
        num_tokens: tokens in these slots.
        num_steps: of the whole run.
        num_preemptions: of the whole run.
    """

    num_sequences: tuple[int, ...]
    num_slots: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_steps: int
    num_preemptions: int

    @property
    def mean_sequences(self) -> float:
        """Sequences at once."""
        return sum(self.num_sequences) / len(self.num_sequences)

    @property
    def mean_length(self) -> float:
        """Tokens per sequence."""
        return sum(self.num_tokens) / sum(self.num_sequences)

    @property
    def waste(self) -> float:
        """Share of the slots held that are empty."""
        return 1 - sum(self.num_tokens) / sum(self.num_slots)


def run(settings: Settings) -> Outcome:
    """Runs the requests paged and reserved, once each: the counts are exact."""
    max_len, num_places, num_requests, settle_steps = (256, 8, 200, 20) if settings.quick else (2048, 64, 6000, 180)
    scale = max_len / 2048
    rng = np.random.default_rng(0)
    prompts = rng.integers(int(100 * scale), int(380 * scale) + 1, num_requests).tolist()
    outputs = rng.integers(1, int(180 * scale) + 1, num_requests).tolist()
    lengths = [Lengths(*pair) for pair in zip(prompts, outputs, strict=True)]
    num_blocks = num_places * max_len // _BLOCK_SIZE
    paged = occupy(lengths, num_blocks=num_blocks, max_len=max_len, settle_steps=settle_steps, reserve=False)
    settings.progress(f"paged: {paged.num_steps} steps")
    reserved = occupy(lengths, num_blocks=num_blocks, max_len=max_len, settle_steps=settle_steps, reserve=True)
    settings.progress(f"reserved: {reserved.num_steps} steps")
    half_block = (_BLOCK_SIZE - 1) / 2
    length = paged.mean_length
    results: tuple[Result, ...] = (
        Result(
            "C11",
            f"empty slots, mean length {length:.0f}",
            100 * paged.waste,
            "%",
            goal=3.0,
            direction="at most",
            floor=100 * half_block / (length + half_block),
            note=f"{100 * reserved.waste:.0f} % when reserved",
        ),
        Result(
            "C11",
            f"sequences at once, over reserving {max_len:,}",
            paged.mean_sequences / reserved.mean_sequences,
            "x",
            goal=6.0,
            floor=max_len / length,
            note=f"{paged.mean_sequences:.0f} and {reserved.mean_sequences:.0f}",
        ),
        Result(
            "C11",
            "steps until all are done, reserved over paged",
            reserved.num_steps / paged.num_steps,
            "x",
            note=f"{paged.num_preemptions:,} preemptions of {num_requests:,} requests",
        ),
    )
    kept = {"paged": paged, "reserved": reserved}
    for model in _MODELS:
        result, occupancies = _windows_result(model, settings)
        results += (result,)
        kept |= occupancies
    raw = {
        name: {
            "num_sequences": occupancy.num_sequences,
            "num_slots": occupancy.num_slots,
            "num_tokens": occupancy.num_tokens,
            "num_steps": occupancy.num_steps,
            "num_preemptions": occupancy.num_preemptions,
        }
        for name, occupancy in kept.items()
    }
    return Outcome(results, raw)


def _windows_result(model: Windows, settings: Settings) -> tuple[Result, dict[str, Occupancy]]:
    """Runs the same requests with the cache divided by windows and undivided, in the same memory."""
    scale, num_places, num_requests = (16, 4, 40) if settings.quick else (1, 16, 240)
    max_len = 16_384 // scale
    rng = np.random.default_rng(1)
    prompts = rng.integers(4000 // scale, 12_000 // scale + 1, num_requests).tolist()
    outputs = rng.integers(1, 1000 // scale + 1, num_requests).tolist()
    lengths = [Lengths(*pair) for pair in zip(prompts, outputs, strict=True)]
    indices = range(model.num_layers)
    windows = [None if index % model.every == model.every - 1 else model.window // scale for index in indices]
    divided = group_layers([LayerShape(1, 1, 1)] * model.num_layers, windows)
    size = max(Counter(divided.of_layers).values())
    num_whole_blocks = num_places * max_len // _BLOCK_SIZE
    kept = {}
    for name, groups, num_blocks in (
        (f"{model.name}, divided", divided.cache_groups, num_whole_blocks * model.num_layers // size),
        (f"{model.name}, undivided", ONE_GROUP, num_whole_blocks),
    ):
        kept[name] = occupy(
            lengths,
            num_blocks=num_blocks,
            max_len=max_len,
            settle_steps=180 // scale,
            reserve=False,
            groups=groups,
            max_num_batched_tokens=8192 // scale,
        )
        settings.progress(f"{name}: {kept[name].num_steps} steps")
    ours, whole = kept.values()
    result = Result(
        "C11",
        f"sequences at once, windows of {model.name}, over an undivided cache",
        ours.mean_sequences / whole.mean_sequences,
        "x",
        note=f"{ours.mean_sequences:.1f} and {whole.mean_sequences:.1f}, mean length {whole.mean_length:.0f}; "
        f"{ours.num_preemptions} and {whole.num_preemptions} preemptions",
    )
    return result, kept


def occupy(
    lengths: Sequence[Lengths],
    *,
    num_blocks: int,
    max_len: int,
    settle_steps: int,
    reserve: bool,
    groups: CacheGroups = ONE_GROUP,
    max_num_batched_tokens: int | None = None,
) -> Occupancy:
    """Runs requests through the scheduler, without a model.

    Args:
        lengths: of the requests, all waiting at the start.
        num_blocks: size of the cache.
        max_len: tokens that each request says it may have.
        settle_steps: steps at the start that do not count.
        reserve: hold blocks for max_len tokens of every sequence from its admission on.
        groups: block tables of a sequence.
        max_num_batched_tokens: of a step; None: prompts never wait for budget, only blocks limit admission.
    """
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=len(lengths),
        cache_groups=groups,
        max_num_batched_tokens=max_num_batched_tokens or num_blocks * _BLOCK_SIZE,
        max_model_len=max_len,
        end_token_ids=frozenset({_END_ID}),
        enable_prefix_caching=False,
        max_waiting=len(lengths),
    )
    scheduler = Scheduler(replace(config, max_preemptions=0) if reserve else config)
    end_of: dict[RequestId, int] = {}
    for index, length in enumerate(lengths, start=1):
        params = SamplingParams(seed=0, max_tokens=max_len)
        scheduler.add_request(Request(RequestId(index), (_TOKEN_ID,) * length.prompt, params, arrival_s=0.0))
        end_of[RequestId(index)] = length.prompt + length.output
    counts: list[tuple[int, int, int]] = []
    num_steps = 0
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        num_steps += 1
        stats = scheduler.stats()
        if num_steps > settle_steps and stats.num_waiting:
            num_slots = (stats.num_blocks - stats.num_free_blocks) * _BLOCK_SIZE
            num_tokens = sum(row.num_computed_tokens + row.num_scheduled_tokens for row in plan.rows)
            if max_num_batched_tokens is None:
                assert len(plan.rows) == stats.num_running, f"{stats.num_running} run, {len(plan.rows)} have a row"
            counts.append((stats.num_running, num_slots, num_tokens))
        scheduler.update(plan, _answer(plan, end_of), 0.0)
    num_sequences, slots, tokens = zip(*counts, strict=True)
    return Occupancy(num_sequences, slots, tokens, num_steps, scheduler.stats().num_preemptions_total)


def _answer(plan: SchedulerOutput, end_of: Mapping[RequestId, int]) -> ModelRunnerOutput:
    """Returns a token for each row, the end token for a row at its end."""
    token_ids = tuple(
        _END_ID if row.num_computed_tokens + row.num_scheduled_tokens + 1 >= end_of[row.request_id] else _TOKEN_ID
        for row in plan.rows
    )
    return ModelRunnerOutput(plan.step, token_ids, {}, {})
