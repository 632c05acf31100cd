"""Limits and policy of the scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.core.drafts import DraftLimits
from engine.core.latency.step_time import StepTimePrior
from engine.errors import ConfigError

SchedulingPolicyName = Literal["fcfs", "priority", "static", "slo"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        cache_groups: block tables of a request.
        max_num_seqs: most requests that run (hold blocks) at once.
        max_num_batched_tokens: token budget of one step.
        max_model_len: most tokens of prompt and output.
        end_token_ids: the model's end tokens.
        enable_prefix_caching: share full blocks of equal prefixes.
        num_state_snapshots: slots for copies of requests' states, for a model that keeps some besides keys and values:
            no prefix without a copy is shared. None: it keeps none.
        records_cache_events: record what enters and leaves the prefix cache, for `Scheduler.take_cache_events`.
        policy: order of admission; `fcfs` shares the engine between sessions and serves each in order; `static` fills
            a batch and runs it until its longest request finishes; `slo` plans by latency targets, see
            `latency/scheduler.py`.
        max_waiting: most requests in the queue; more are rejected, unless their session has less than its share.
        max_preemptions: bound per request. A request at the bound is not preempted while it can run, and is resumed
            only with blocks for its maximum length. 0 reserves all blocks on admission.
        max_steps_in_flight: plans that may be scheduled before the first is updated.
        num_stages: pipeline stages that the model is divided into. With several, steps in flight are in different
            stages. A request has no row while its sample is in flight, and a step takes its share of the requests.
        drafts: add drafts to rows, see `draft_scheduler.py`; None: rows have none.
        step_time: prior of the step-time model, needed by `slo`.
        best_effort_share: under `slo`, share of the prompt tokens and of the slots for requests without targets while
            others wait too.
        max_step_s: under `slo`, how long a step may last while no running request has an inter-token target.
        tenant_weights: under `slo`, shares of tenants relative to those not named, which have 1.
    """

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    end_token_ids: frozenset[int] = frozenset()
    block_size: int = 16
    cache_groups: CacheGroups = ONE_GROUP
    enable_prefix_caching: bool = True
    num_state_snapshots: int | None = None
    records_cache_events: bool = False
    policy: SchedulingPolicyName = "fcfs"
    max_waiting: int = 4096
    max_preemptions: int = 8
    max_steps_in_flight: int = 1
    num_stages: int = 1
    drafts: DraftLimits | None = None
    step_time: StepTimePrior | None = None
    best_effort_share: float = 0.1
    max_step_s: float = 0.1
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def max_tokens_in_flight(self) -> int:
        """Most tokens of all steps in flight."""
        return self.max_num_batched_tokens * self.max_steps_in_flight

    @property
    def num_cache_blocks(self) -> int:
        """Blocks of tokens that the cache holds in all layers; each takes one of the pool for each group."""
        return self.num_blocks // self.cache_groups.num_groups

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the cache holds in all layers; of requests longer than a window it holds more."""
        return self.num_cache_blocks * self.block_size

    @property
    def longest_request(self) -> int | None:
        """Tokens of the longest request that fits in the cache; None: there is no longest one."""
        return self.cache_groups.longest(self.num_blocks, self.max_tokens_in_flight, self.block_size)


def check_config(config: SchedulerConfig) -> None:
    """Checks the ranges that the scheduler relies on.

    Raises: ConfigError: names the field and the numbers.
    """
    for name, value in (
        ("num_blocks", config.num_blocks),
        ("block_size", config.block_size),
        ("max_num_seqs", config.max_num_seqs),
        ("max_num_batched_tokens", config.max_num_batched_tokens),
        ("max_steps_in_flight", config.max_steps_in_flight),
        ("num_stages", config.num_stages),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    if config.max_waiting < 0 or config.max_preemptions < 0:
        raise ConfigError(
            f"max_waiting is {config.max_waiting} and max_preemptions {config.max_preemptions}, must be at least 0"
        )
    longest = config.longest_request
    if config.max_model_len < 2 or (longest is not None and config.max_model_len > longest):
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, must be from 2 to the {longest} tokens that "
            f"{config.num_blocks} blocks of {config.block_size} hold"
        )
    shares_prefixes = config.enable_prefix_caching or config.num_state_snapshots
    if config.num_state_snapshots is not None and config.cache_groups.num_windowed and shares_prefixes:
        raise ConfigError(
            f"enable_prefix_caching is {config.enable_prefix_caching} and num_state_snapshots is "
            f"{config.num_state_snapshots}, must be False and 0: prefixes are not shared with states and windows"
        )
    if config.policy == "slo" and config.num_stages > 1:
        raise ConfigError(
            f"the policy slo is not supported with {config.num_stages} pipeline stages: its model of step times has no "
            "steps that overlap; use fcfs or priority"
        )
    if config.policy == "slo" and config.step_time is None:
        raise ConfigError("the policy slo needs a prior of step times, step_time is not set")
    if config.drafts is not None:
        _check_drafts(config, config.drafts)
    if not 0.0 <= config.best_effort_share < 1.0:
        raise ConfigError(f"best_effort_share is {config.best_effort_share}, must be at least 0 and below 1")
    if not config.max_step_s > 0.0:
        raise ConfigError(f"max_step_s is {config.max_step_s}, must be above 0")
    for tenant, weight in config.tenant_weights.items():
        if not weight > 0.0:
            raise ConfigError(f"the weight of tenant {tenant!r} is {weight}, must be above 0")


def _check_drafts(config: SchedulerConfig, drafts: DraftLimits) -> None:
    num_drafts, shortest, longest = drafts.num_speculative_tokens, drafts.prompt_lookup_min, drafts.prompt_lookup_max
    if not 1 <= num_drafts < config.max_num_seqs:
        raise ConfigError(
            f"num_speculative_tokens is {num_drafts}, must be at least 1 and below max_num_seqs, which is "
            f"{config.max_num_seqs}: a step has logits at as many positions"
        )
    if not 1 <= shortest <= longest:
        raise ConfigError(
            f"prompt_lookup_min is {shortest} and prompt_lookup_max {longest}, must be at least 1 and in this order"
        )
    reason = None
    if config.policy == "slo":
        reason = "the policy slo, whose model of step times has one token per request and step; use fcfs or priority"
    elif config.num_stages > 1:
        reason = f"{config.num_stages} pipeline stages, where a step begins before the tokens of the last one are known"
    elif config.max_steps_in_flight > 1:
        reason = f"{config.max_steps_in_flight} steps in flight: a draft follows the last token, which must be known"
    elif config.num_state_snapshots is not None:
        reason = "a model that keeps state besides keys and values, which cannot go back to the token before a draft"
    if reason is not None:
        raise ConfigError(f"drafts are not supported with {reason}")
