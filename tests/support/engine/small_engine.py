"""Small engines on a simulated GPU, or on a CPU, that answer a few requests."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.config import EngineConfig, parse_config
from engine.core.outputs import RequestOutput, SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.model.model_folder import check_folder
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


class Answer(NamedTuple):
    """Tokens and, of a request that wants them, their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]


def answers_with_flags(
    model: Path, prompts: Sequence[Sequence[int]], params: SamplingParams, *flags: str
) -> list[Answer]:
    """Checks and loads a model as the program `engine` does with these flags; returns answers to prompts at once."""
    config = parse_config(("--model", str(model), "--device", "cpu", *flags), {})
    check_folder(model)
    parts = build_engine(config, StartupProgress())
    for number, prompt in enumerate(prompts):
        request = Request(RequestId(1 + number), tuple(prompt), params, arrival_s=0.0)
        parts.scheduler.add_request(request)
    found = [Answer([], []) for _ in prompts]
    for output in _outputs(parts):
        answer = found[output.request_id - 1]
        answer.token_ids.extend(output.token_ids)
        answer.logprobs.extend(row.chosen for row in output.logprobs)
    return found


def answer(parts: EngineParts, prompt_ids: tuple[int, ...], params: SamplingParams) -> list[int]:
    """Returns the tokens of one request."""
    parts.scheduler.add_request(Request(RequestId(1), prompt_ids, params, arrival_s=0.0))
    return run_to_the_end(parts)[1]


def run_to_the_end(parts: EngineParts) -> dict[int, list[int]]:
    """Computes all requests of the scheduler; returns their tokens, by request."""
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    for output in _outputs(parts):
        tokens[output.request_id] += output.token_ids
    return tokens


def _outputs(parts: EngineParts) -> Iterator[RequestOutput]:
    in_flight: deque[SchedulerOutput] = deque()
    while parts.scheduler.has_work() or in_flight:
        if parts.scheduler.has_work():
            in_flight.append(parts.scheduler.schedule(0.0))
            parts.runner.launch(in_flight[-1])
        if len(in_flight) == parts.scheduler.max_steps_in_flight or not parts.scheduler.has_work():
            yield from parts.scheduler.update(in_flight.popleft(), parts.runner.collect(), 0.0)
