"""Quality loss of products in bf16, and of weights and caches in integers, on the bundled demo model.

Claim: 8-bit weights with a scale per output channel, activations quantised per token and an int8 KV cache keep the
quality of a model's answers.

Goal: perplexity within 1 % of fp32, with products in bf16, with int8 weights and with int8 weights and KV cache. 4-bit
weights have none: they are rounded to nearest here, in groups of 32 inputs, where tools that write such checkpoints
compensate the error.

Method: held-out stories of the demo's generator, none of them trained on. Every token is scored by the engine itself
(`forced_scores`), so that the texts use quantised products and cache as any request does. First the fp32
engine's loss must be that of `transformers`. Also printed: the error of the logits (all of them at some positions, each
position's mean taken out, since no probability depends on it) relative to their spread; how often the greedy token is
the same after the same text; and how far free greedy answers agree before their first difference, up to the end token
of the exact one.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload
from engine.bench.agreement import load_reference
from engine.bench.forced_scores import Scores, score_texts
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.int4_checkpoint import write_int4_checkpoint
from engine.bench.serve import engine
from engine.bench.transformers_peer import import_transformers
from engine.config import EngineConfig
from engine.demo import MODEL_DIR
from engine.flags import DtypeName, KVCacheDtypeName, Quantization
from engine.serving.parts import EngineParts
from kernels.cpu.cpu_features import cpu_features


class _Mode(NamedTuple):
    """Fields of `EngineConfig`."""

    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtypeName = "auto"
    dtype: DtypeName = "auto"


_MODES = {
    "fp32": _Mode(),
    "bf16 products": _Mode(dtype="bfloat16"),
    "int8 weights": _Mode("int8"),
    "int8 weights and KV": _Mode("int8", "int8"),
    "int4 weights": _Mode(),
}
_INT4 = "int4 weights"
HELD_OUT_DOCUMENTS = Path(__file__).parent / "held_out_documents.json"
_EXACT = "fp32"
_MAX_PERPLEXITY_LOSS_PERCENT = 1.0
_MAX_LOSS_ERROR = 1e-4  # nats per token between two fp32 implementations
_PROMPT_LEN = 16
_FULL_EVERY = 7  # of every n-th position all logits; n is coprime to the block size


@dataclass(frozen=True, slots=True)
class _Answered:
    """Results of one mode.

    Attributes:
        scores: every token, with the greedy one.
        logits: [positions, vocab_size], up to a constant per position.
        answers: greedy, of the texts' beginnings.
    """

    scores: Scores
    logits: npt.NDArray[np.float64]
    answers: tuple[tuple[int, ...], ...]


def run(settings: Settings) -> Outcome:
    """Scores the same texts in every mode."""
    num_texts, num_full, answer_len = (3, 1, 8) if settings.quick else (settings.options.texts, 8, 64)
    texts = _held_out_texts(num_texts)
    if settings.quick:
        texts = [text[:24] for text in texts]
    answered = {}
    with TemporaryDirectory() as folder:
        int4 = Path(folder) / "int4"
        write_int4_checkpoint(MODEL_DIR, int4)
        for name, mode in _MODES.items():
            if mode.dtype == "bfloat16" and not cpu_features().bf16:
                continue  # it would be exact
            parts = engine(
                EngineConfig(
                    model=str(int4 if name == _INT4 else MODEL_DIR),
                    **mode._asdict(),
                    threads=settings.threads,
                )
            )
            answered[name] = _answer(parts, texts, num_full, answer_len)
            settings.progress(f"{name}: perplexity {answered[name].scores.perplexity:.5f}")
            if name == _EXACT:
                _check_loss(answered[name].scores.loss, texts)

    exact = answered[_EXACT]
    results = [
        Result("quality", "perplexity, fp32", exact.scores.perplexity, note=f"{len(exact.scores.logprobs):,} tokens")
    ]
    for name, answers in answered.items():
        if name != _EXACT:
            results += _results(name, answers, exact)
    raw = {
        name: {
            "logprobs": [score.chosen for score in mode.scores.logprobs],
            "greedy_ids": [score.top_ids[0] for score in mode.scores.logprobs],
            "answers": mode.answers,
        }
        for name, mode in answered.items()
    }
    return Outcome(tuple(results), raw)


def _answer(parts: EngineParts, texts: Sequence[Sequence[int]], num_full: int, answer_len: int) -> _Answered:
    vocab_size = parts.info.vocab_size
    full = score_texts(parts, texts[:num_full], num_top=vocab_size, every=_FULL_EVERY)
    prompts = tuple(tuple(text[:_PROMPT_LEN]) for text in texts)
    run = serve_anew(parts, Workload(prompts, (answer_len,) * len(prompts)))
    answers = tuple(up_to_end(answer, parts.info.end_token_ids) for answer in run.output_ids)
    return _Answered(score_texts(parts, texts), _all_logits(full, vocab_size), answers)


def up_to_end(answer: Sequence[int], end_token_ids: Collection[int]) -> tuple[int, ...]:
    """Returns the answer up to and including its first end token; the model was not trained beyond it."""
    ends = [index for index, token_id in enumerate(answer) if token_id in end_token_ids]
    return tuple(answer[: ends[0] + 1] if ends else answer)


def _all_logits(scores: Scores, vocab_size: int) -> npt.NDArray[np.float64]:
    """Returns logits [positions, vocab_size] from log-probabilities of all tokens, minus the mean of each position."""
    logits = np.full((len(scores.logprobs), vocab_size), np.nan)
    for row, score in zip(logits, scores.logprobs, strict=True):
        row[list(score.top_ids)] = score.top_values
    if np.isnan(logits).any():
        raise BenchmarkError("a position lacks log-probabilities of some tokens")
    centred: npt.NDArray[np.float64] = logits - logits.mean(axis=1, keepdims=True)
    return centred


def _results(name: str, mode: _Answered, exact: _Answered) -> list[Result]:
    lost = 100 * (mode.scores.perplexity / exact.scores.perplexity - 1)
    error = mode.logits - exact.logits
    rms_error = float(np.sqrt(np.mean(error**2)))
    spread = float(np.sqrt(np.mean(exact.logits**2)))
    same = [a.top_ids[0] == b.top_ids[0] for a, b in zip(mode.scores.logprobs, exact.scores.logprobs, strict=True)]
    common = [common_prefix(a, b) for a, b in zip(mode.answers, exact.answers, strict=True)]
    mean_len = statistics.fmean(map(len, exact.answers))
    num_equal = sum(a == b for a, b in zip(mode.answers, exact.answers, strict=True))
    return [
        Result(
            "quality",
            f"perplexity over fp32's, {name}",
            lost,
            "%",
            goal=None if name == _INT4 else _MAX_PERPLEXITY_LOSS_PERCENT,
            direction="at most",
            note=f"perplexity {mode.scores.perplexity:.4f}",
        ),
        Result(
            "quality",
            f"logits error over their spread, {name}",
            100 * rms_error / spread,
            "%",
            note=f"RMS {rms_error:.4f} of {spread:.2f}, worst {float(np.abs(error).max()):.3f}, {error.size:,} logits",
        ),
        Result(
            "quality",
            f"greedy token the same, {name}",
            100 * statistics.fmean(same),
            "%",
            note=f"free answers agree for {statistics.fmean(common):.1f} of {mean_len:.1f} tokens, "
            f"{num_equal} of {len(common)} to the end",
        ),
    ]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of tokens before the first difference or the end of the shorter one."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _held_out_texts(count: int) -> list[list[int]]:
    """Returns token ids of held-out documents; tests/engine/demo compares them with their generator."""
    import_transformers()  # names the extra to install if `tokenizers` is missing
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    texts = json.loads(HELD_OUT_DOCUMENTS.read_text())[:count]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


@torch.inference_mode()
def _check_loss(loss: float, texts: Sequence[Sequence[int]]) -> None:
    """Raises BenchmarkError if the fp32 engine and `transformers` disagree about the loss of these texts."""
    model = load_reference(MODEL_DIR)
    total, num_tokens = 0.0, 0
    for text in texts:
        tokens = torch.tensor([text])
        logits = model(input_ids=tokens[:, :-1]).logits[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        num_tokens += len(text) - 1
    expected = total / num_tokens
    if abs(loss - expected) > _MAX_LOSS_ERROR:
        raise BenchmarkError(f"fp32 loss is {loss:.6f} nats per token, that of transformers is {expected:.6f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--texts", type=int, default=99, help="held-out documents, at most 99 (default: 99)")
