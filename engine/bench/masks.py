"""Cost of structured output per step.

Claim: masks cost little compared with sampling, and very little compared with a step of even the smallest model.

Goal: none; the cost is measured and printed.

Method: 64 rows at temperature 1, either all free or 32 of them constrained to an endless sequence of objects of a JSON
schema of medium size (nested objects, an array, a pattern, bounds); every row samples in every step. "draws" is the
sampler alone on fixed logits: it computes masks, draws tokens and advances the grammars, with the demo model's
vocabulary and with one of 128,000 tokens grown from it. "steps" are whole steps of the demo model. A sample is the
mean over the steps of a run (a median would hide the few slow masks); variants alternate. The note gives the time of
the masks alone.
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import torch

from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from engine.bench.serve import engine
from engine.config import EngineConfig
from engine.constraints.constraint import Constraint, HeldBackEnds
from engine.constraints.grammar import GrammarMatcher, GrammarTokenizer
from engine.core.request import Request, RequestId, SamplingParams
from engine.demo import MODEL_DIR
from engine.interfaces import execute
from engine.runner.row_masks import MaskedRow, RowMasks, accept
from engine.runner.stream import InlineStream
from engine.serving.parts import EngineParts
from kernels.families import cpu_ops
from kernels.sampling import SamplingBatch, TokenMasks, greedy_batch

_NUM_ROWS, _NUM_STRUCTURED = 64, 32
_LARGE_VOCABULARY = 128_000
_END_ID = 1
_FREE, _STRUCTURED = "all free", "half structured"

_ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "address": _ADDRESS,
        "status": {"enum": ["active", "inactive", "banned"]},
    },
    "required": ["name", "age", "tags", "address", "status"],
    "additionalProperties": False,
}
_GRAMMAR = f"start: person+\nperson: %json {json.dumps(_PERSON)}"


def run(settings: Settings) -> Outcome:
    """Measures draws with both vocabularies, and whole steps."""
    num_steps = 3 if settings.quick else 100
    results: list[Result] = []
    raw: dict[str, object] = {}
    small = (MODEL_DIR / "tokenizer.json").read_bytes()
    for tokenizer_json in (small, grown_tokenizer(small, 3200 if settings.quick else _LARGE_VOCABULARY)):
        vocab_size = len(json.loads(tokenizer_json)["model"]["vocab"])
        started_s = time.perf_counter()
        matcher = GrammarMatcher.compile(_GRAMMAR, GrammarTokenizer(tokenizer_json, vocab_size, {_END_ID}))
        results.append(
            Result(
                "masks", f"{vocab_size:,} tokens, tokenizer and schema read, s", time.perf_counter() - started_s, "s"
            )
        )
        _add(f"{vocab_size:,} tokens, draws", _Draws(vocab_size, matcher, num_steps).run, settings, results, raw)
    parts = engine(EngineConfig(model=str(MODEL_DIR), max_num_seqs=_NUM_ROWS, threads=settings.threads))
    matcher = GrammarMatcher.compile(_GRAMMAR, GrammarTokenizer(small, parts.info.vocab_size, {_END_ID}))
    _add("demo model, steps", partial(_steps, parts, matcher, num_steps), settings, results, raw)
    return Outcome(tuple(results), raw=raw)


def _add(
    what: str,
    measure: Callable[[int, list[float]], float],
    settings: Settings,
    results: list[Result],
    raw: dict[str, object],
) -> None:
    """Measures one pair of variants."""
    masks_ms: list[float] = []
    samples: Samples = alternate(
        {_FREE: lambda: measure(0, []), _STRUCTURED: lambda: measure(_NUM_STRUCTURED, masks_ms)},
        rounds=settings.rounds,
        progress=lambda text: settings.progress(f"{what}: {text}"),
    )
    ratio = samples.ratio(_STRUCTURED, _FREE)
    note = f"{ratio.low:.3f}..{ratio.high:.3f}; "
    note += f"medians {samples.median(_STRUCTURED):.3f} and {samples.median(_FREE):.3f} ms"
    if masks_ms:
        masks_ms = masks_ms[-settings.rounds :]  # without the warm-up
        note += f"; masks alone {statistics.median(masks_ms):.3f} ms"
    results.append(Result("masks", f"{what}, half structured over all free", ratio.best, "x", note=note))
    raw[what] = {"mean_ms": samples.raw, "masks_ms": masks_ms}


class _Draws:
    """The sampler and the masks without a model."""

    def __init__(self, vocab_size: int, matcher: GrammarMatcher, num_steps: int) -> None:
        self._vocab_size = vocab_size
        self._matcher = matcher
        self._num_steps = num_steps
        self._ops = cpu_ops()
        generator = torch.Generator().manual_seed(0)
        self._logits = [3.0 * torch.randn(_NUM_ROWS, vocab_size, generator=generator) for _ in range(4)]

    def run(self, num_structured: int, masks_ms: list[float]) -> float:
        """Returns milliseconds per step; appends the time of the masks in each run."""
        masks = RowMasks(max_num_seqs=_NUM_ROWS, vocab_size=self._vocab_size, stream=InlineStream())
        constraints = [_endless(self._vocab_size, self._matcher) for _ in range(num_structured)]
        masking_s = 0.0
        started_s = time.perf_counter()
        for step in range(self._num_steps):
            masked = [MaskedRow(row, row, step, constraint) for row, constraint in enumerate(constraints)]
            before_s = time.perf_counter()
            token_masks = masks.prepare(masked, _NUM_ROWS)() if masked else None
            masking_s += time.perf_counter() - before_s
            batch = _sampling_batch(step, token_masks)
            sampled = self._ops.sample(self._logits[step % len(self._logits)], batch)
            before_s = time.perf_counter()
            accept(masked, sampled.token_ids.numpy())
            masking_s += time.perf_counter() - before_s
        masks_ms.append(1e3 * masking_s / self._num_steps)
        return 1e3 * (time.perf_counter() - started_s) / self._num_steps


_request_ids = count(1)


def _steps(parts: EngineParts, matcher: GrammarMatcher, num_steps: int, num_structured: int, _: list[float]) -> float:
    """Returns milliseconds per step of an engine in which every row samples."""
    params = SamplingParams(seed=0, max_tokens=num_steps + 2, ignore_end_token=True)
    for row in range(_NUM_ROWS):
        constraint = _endless(parts.info.vocab_size, matcher) if row < num_structured else None
        parts.scheduler.add_request(
            Request(RequestId(next(_request_ids)), (2 + row, 3, 4), params, arrival_s=0.0, constraint=constraint)
        )
    seconds = []
    while parts.scheduler.has_work():
        started_s = time.perf_counter()
        plan = parts.scheduler.schedule(started_s)
        parts.scheduler.update(plan, execute(parts.runner, plan), started_s)
        if plan.num_tokens == len(plan.rows) == _NUM_ROWS:
            seconds.append(time.perf_counter() - started_s)
    assert len(seconds) >= num_steps, f"{len(seconds)} steps had all rows, {num_steps} were to be timed"
    return 1e3 * sum(seconds) / len(seconds)


def _endless(vocab_size: int, matcher: GrammarMatcher) -> Constraint:
    ends = HeldBackEnds((_END_ID,), always=(_END_ID,))
    return Constraint(vocab_size, matcher=matcher.copy(), ends=ends)


def grown_tokenizer(tokenizer_json: bytes, vocab_size: int) -> bytes:
    """Returns a byte-level BPE tokenizer with more tokens: words of the first one, extended letter by letter."""
    tokenizer = json.loads(tokenizer_json)
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    words = [token for token in vocabulary if token.isascii() and token.isalpha()]
    letters = [word for word in words if len(word) == 1]
    rng = random.Random(0)
    while len(vocabulary) < vocab_size:
        word, letter = rng.choice(words), rng.choice(letters)
        if len(word) <= 10 and word + letter not in vocabulary:
            vocabulary[word + letter] = len(vocabulary)
            merges.append([word, letter])
            words.append(word + letter)
    return json.dumps(tokenizer).encode()


def _sampling_batch(step: int, masks: TokenMasks | None) -> SamplingBatch:
    return greedy_batch(
        _NUM_ROWS,
        temperature=torch.ones(_NUM_ROWS, dtype=torch.float64),
        seed=torch.arange(_NUM_ROWS),
        position=torch.full((_NUM_ROWS,), step),
        any_penalised=False,
        any_filtered=False,
        masks=masks,
    )
