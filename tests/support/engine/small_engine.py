"""Small engines on a simulated GPU, or on a CPU, that answer a few requests."""

from collections import defaultdict, deque
from pathlib import Path

from engine.config import EngineConfig
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.serving.parts import EngineParts
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress


def build(model_dir: Path, **fields: object) -> EngineParts:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "dtype": "float32"}
    limits |= {"kernel_check": "off", **fields}  # the interpreter takes seconds for it
    return build_engine(EngineConfig(model=str(model_dir), **limits), StartupProgress())  # type: ignore[arg-type]


def answers(parts: EngineParts) -> dict[int, list[int]]:
    """Returns the tokens of three requests that share steps, by request."""
    for number in range(3):
        prompt_ids = tuple(range(5 + number, 12 + 6 * number))
        params = SamplingParams(seed=number, max_tokens=3, temperature=0.0 if number else 0.9, ignore_end_token=True)
        parts.scheduler.add_request(Request(RequestId(1 + number), prompt_ids, params, arrival_s=0.0))
    return run_to_the_end(parts)


def run_to_the_end(parts: EngineParts) -> dict[int, list[int]]:
    """Computes all requests of the scheduler; returns their tokens, by request."""
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    in_flight: deque[SchedulerOutput] = deque()
    while parts.scheduler.has_work() or in_flight:
        if parts.scheduler.has_work():
            in_flight.append(parts.scheduler.schedule(0.0))
            parts.runner.launch(in_flight[-1])
        if len(in_flight) == parts.scheduler.max_steps_in_flight or not parts.scheduler.has_work():
            for output in parts.scheduler.update(in_flight.popleft(), parts.runner.collect(), 0.0):
                tokens[output.request_id] += output.token_ids
    return tokens
