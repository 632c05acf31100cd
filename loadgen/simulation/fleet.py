"""A fleet of engine twins behind the production placement, event by event."""

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.config import SchedulerConfig
from engine.core.latency.step_time import StepTimePrior
from engine.errors import ConfigError
from frontend.routing.placement import Candidate, EngineLoad, Placement
from loadgen.errors import OptionError
from loadgen.simulation.engine_twin import EngineTwin
from loadgen.simulation.policies import PolicySpec
from loadgen.simulation.step_cost import StepTimer
from loadgen.simulation.workload import END_TOKEN, Outcome, SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What is simulated.

    Attributes:
        num_engines: equal engines.
        cost: of their steps.
        policy: of their schedulers.
        kv_cache_tokens, block_size, max_num_seqs, max_model_len, max_steps_in_flight: of each engine.
        has_prefix_cache: whether engines share full blocks of equal prefixes.
        knows_rates: whether engines report the rate of their device; without it, placement compares tokens.
        noise, stall_share, stall_s: see `StepTimer`.
        transit_s: between a request's arrival and when its engine has it: what frontend, connections and client add
            to its first token.
        report_interval_s: between load reports of an engine; the requests of the fleet's one frontend count at once.
        seed: of the noise.
    """

    num_engines: int
    cost: StepTimePrior
    policy: PolicySpec
    kv_cache_tokens: int
    max_num_seqs: int = 256
    max_model_len: int = 20_480
    block_size: int = 16
    max_steps_in_flight: int = 1
    has_prefix_cache: bool = True
    knows_rates: bool = True
    noise: float = 0.0
    stall_share: float = 0.0
    stall_s: float = 0.05
    transit_s: float = 0.0
    report_interval_s: float = 0.25
    seed: int = 0


@dataclass(slots=True)
class FleetRun:
    """What a simulation recorded besides its requests.

    Attributes:
        ended_s: virtual seconds of the last event.
        num_steps, busy_s: of all engines.
        engine_busy_s: per engine.
        num_prompt_tokens: tokens of prompts computed.
        num_preemptions: of requests.
        gaps_s: by class name, seconds between tokens.
    """

    ended_s: float = 0.0
    num_steps: int = 0
    busy_s: float = 0.0
    engine_busy_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    gaps_s: dict[str, "array[float]"] = field(default_factory=dict)


class _Node:
    """An engine with what the frontend's session knows of it."""

    def __init__(self, instance_id: str, engine: EngineTwin, prompt_tokens_per_s: float) -> None:
        self.instance_id = instance_id
        self.engine = engine
        self.next_s: float | None = None
        self.num_open = 0
        self.waiting: dict[int, tuple[int, int]] = {}  # without a first token: prompt tokens, of these probably cached
        self.num_waiting_tokens = 0
        self.num_cached_tokens = 0
        self.num_free_tokens = engine.num_free_tokens
        self.prompt_tokens_per_s = prompt_tokens_per_s
        self.reported_s = -math.inf

    def load(self) -> EngineLoad:
        """As `EngineSession.load`."""
        num_waiting_tokens = self.num_waiting_tokens - (self.num_cached_tokens if self.prompt_tokens_per_s else 0)
        return EngineLoad(self.num_open, num_waiting_tokens, self.num_free_tokens, self.prompt_tokens_per_s)

    def submit(self, request: SimulatedRequest, num_cached_tokens: int) -> None:
        self.num_open += 1
        self.waiting[request.index] = request.input_tokens, num_cached_tokens
        self.num_waiting_tokens += request.input_tokens
        self.num_cached_tokens += num_cached_tokens
        self.engine.submit(request)

    def advance(self, now_s: float, report_interval_s: float) -> float | None:
        """Advances the engine; returns when to call again."""
        engine = self.engine
        self.next_s = engine.advance(now_s)
        self.num_open -= len(engine.ended)
        for request in (*engine.started, *engine.ended):
            num_tokens, num_cached_tokens = self.waiting.pop(request.index, (0, 0))
            self.num_waiting_tokens -= num_tokens
            self.num_cached_tokens -= num_cached_tokens
        engine.started.clear()
        engine.ended.clear()
        if now_s >= self.reported_s + report_interval_s:
            self.reported_s = now_s
            self.num_free_tokens = engine.num_free_tokens
        return self.next_s


def simulate(requests: Sequence[SimulatedRequest], options: FleetOptions, until_s: float = math.inf) -> FleetRun:
    """Serves requests in virtual time and writes what became of each into it.

    Args:
        requests: fresh ones, in order of arrival.
        options: the fleet.
        until_s: virtual seconds at which what is still open ends as unfinished.

    Raises:
        OptionError: the scheduler refuses the limits; names the field.
        AssertionError: a request ended twice or never.
    """
    rate = 1 / options.cost.coefficients.token_s if options.knows_rates and options.cost.coefficients.token_s else 0.0
    try:
        nodes = [_Node(str(index), _engine(options, index, requests), rate) for index in range(options.num_engines)]
    except ConfigError as error:
        raise OptionError(str(error)) from error
    placement = Placement()
    events: list[tuple[float, int]] = []  # heap: when an engine is to be advanced, and its index
    run = FleetRun()
    num_placed, now_s = 0, 0.0

    while True:
        arrival_s = requests[num_placed].arrival_s + options.transit_s if num_placed < len(requests) else math.inf
        event_s = events[0][0] if events else math.inf
        if min(arrival_s, event_s) > until_s or (arrival_s == math.inf and not any(node.num_open for node in nodes)):
            break
        if arrival_s <= event_s:
            now_s = arrival_s
            request = requests[num_placed]
            num_placed += 1
            index, num_cached_tokens = _place(request, nodes, placement)
            request.engine = index
            nodes[index].submit(request, num_cached_tokens)
            if nodes[index].engine.is_idle and nodes[index].next_s != now_s:
                nodes[index].next_s = now_s  # not at once: others may arrive at the same time
                heapq.heappush(events, (now_s, index))
        else:
            now_s, index = heapq.heappop(events)
            if nodes[index].next_s == now_s:  # otherwise it was advanced since
                next_s = nodes[index].advance(now_s, options.report_interval_s)
                if next_s is not None:
                    heapq.heappush(events, (next_s, index))
    now_s = min(until_s, max(now_s, requests[-1].arrival_s)) if requests else now_s
    for request in requests[num_placed:]:
        request.end(Outcome.UNFINISHED, "arrived after the end of the simulation", now_s)
    for node in nodes:
        node.engine.stop(now_s)
    return _collected(run, nodes, requests, now_s)


def _engine(options: FleetOptions, index: int, requests: Sequence[SimulatedRequest]) -> EngineTwin:
    config = SchedulerConfig(
        num_blocks=max(1, options.kv_cache_tokens // options.block_size),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.policy.budget,
        max_model_len=options.max_model_len,
        end_token_ids=frozenset({END_TOKEN}),
        block_size=options.block_size,
        enable_prefix_caching=options.has_prefix_cache,
        policy=options.policy.scheduling,
        max_waiting=options.policy.max_waiting,
        max_steps_in_flight=options.max_steps_in_flight,
        step_time=options.cost if options.policy.scheduling == "slo" else None,
    )
    timer = StepTimer(
        options.cost,
        noise=options.noise,
        stall_share=options.stall_share,
        stall_s=options.stall_s,
        seed=f"steps {options.seed} {index}",
    )
    longest = max((request.output_tokens for request in requests), default=1)
    return EngineTwin(config, timer, options.policy, max_tokens=max(4096, longest))


def _place(request: SimulatedRequest, nodes: Sequence[_Node], placement: Placement) -> tuple[int, int]:
    """Returns the engine's index and how many prompt tokens placement believes to be in its cache."""
    if len(nodes) == 1:
        return 0, 0
    candidates = [Candidate(node.instance_id, node.load()) for node in nodes]
    return placement.choose(candidates, array("I", request.prompt_ids()).tobytes(), b"")


def _collected(run: FleetRun, nodes: Sequence[_Node], requests: Sequence[SimulatedRequest], now_s: float) -> FleetRun:
    run.ended_s = now_s
    for node in nodes:
        engine = node.engine
        run.num_steps += engine.num_steps
        run.busy_s += engine.busy_s
        run.engine_busy_s.append(engine.busy_s)
        run.num_prompt_tokens += engine.num_prompt_tokens
        run.num_preemptions += engine.scheduler.stats().num_preemptions_total
        for name, gaps in engine.gaps_s.items():
            run.gaps_s.setdefault(name, array("d")).extend(gaps)
    for request in requests:
        assert request.outcome is not None, f"request {request.index} has not ended"
    return run
