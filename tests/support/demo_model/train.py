"""Builds the demo model from nothing: draws the text, trains the tokenizer and the model, writes the checkpoint.

    python -m tests.support.demo_model.train [--out DIR] [--minutes 35] [--seed 0]

The time limit sets the learning-rate schedule, so that a run ends with the rate at its floor however fast the machine
is. The text, the initial weights and the order of batches follow from the seed; how many steps fit does not.
"""

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from engine.demo import MODEL_DIR
from tests.support.demo_model.checkpoint import VOCAB_SIZE, model_config, save_model, save_tokenizer
from tests.support.demo_model.corpus import (
    PAD_ID,
    TRAIN_SPLIT,
    Batch,
    encode_documents,
    make_batches,
    rendered,
    train_tokenizer,
)

_NUM_THREADS = 2
_TOKENIZER_DOCUMENTS = 12_000
_EPOCH_DOCUMENTS = 16_384
_BATCH_TOKENS = 4_096
_LEARNING_RATE = 4e-3
_WARMUP_SHARE = 0.02
_FINAL_SHARE = 0.02
_LOG_EVERY_S = 10.0
_SAVE_EVERY_S = 240.0
# Short answers are 4 documents in 10 but 6 % of the tokens: without a weight they are learned last.
_SHORT_TOKENS = 100
_SHORT_WEIGHT = 3.0


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What the run did, kept beside the model so that its text can be drawn again."""

    seed: int
    num_documents: int
    num_tokens: int
    num_steps: int
    minutes: float
    final_loss: float


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms, under one learning rate."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self._members: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    def step(self, learning_rate: float) -> None:
        """One update of every parameter; gradients are cleared."""
        for member in self._members:
            for group in member.param_groups:
                group["lr"] = learning_rate
            member.step()
            member.zero_grad(set_to_none=True)


def learning_rate(share: float) -> float:
    """The rate when `share` of the time is over: a short linear warm-up, flat, then linear to nearly nothing."""
    if share < _WARMUP_SHARE:
        return _LEARNING_RATE * max(share / _WARMUP_SHARE, 0.02)
    decay = min(1.0, (1.0 - share) / 0.6)
    return _LEARNING_RATE * max(decay, _FINAL_SHARE)


def accumulate_gradients(model: LlamaForCausalLM, batch: Batch) -> float:
    """Add the gradient of the batch's weighted mean loss, and return its plain mean: nats a token, padding left out."""
    weights = [_SHORT_WEIGHT if part.shape[1] <= _SHORT_TOKENS else 1.0 for part in batch.parts]
    counts = [int((part[:, 1:] != PAD_ID).sum()) for part in batch.parts]
    total_weight = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    total = 0.0
    for part, weight in zip(batch.parts, weights, strict=True):
        tokens = torch.from_numpy(part)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            targets = tokens[:, 1:].flatten()
            scored = targets != PAD_ID
            logits = model.lm_head(hidden.flatten(0, 1)[scored])
        loss = F.cross_entropy(logits.float(), targets[scored], reduction="sum")
        torch.autograd.backward(loss * (weight / total_weight))
        total += loss.item()
    return total / sum(counts)


def train(out: Path, minutes: float, seed: int) -> TrainingRecord:
    """The whole run. Writes checkpoints on the way; the last one is the result."""
    torch.manual_seed(seed)
    torch.set_num_threads(_NUM_THREADS)
    started = time.monotonic()
    tokenizer = train_tokenizer(rendered(TRAIN_SPLIT, seed, 0, _TOKENIZER_DOCUMENTS), VOCAB_SIZE)
    save_tokenizer(tokenizer, out)
    model = LlamaForCausalLM(model_config())
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, tokenizer after {time.monotonic() - started:.0f} s"
    )
    optimizers = Optimizers(model)
    limit_s = minutes * 60
    step = num_tokens = num_documents = 0
    batches: list[Batch] = []
    mean_loss, last_log, last_save, logged_tokens = 0.0, started, started, 0
    while (elapsed := time.monotonic() - started) < limit_s:
        if not batches:
            stop = num_documents + _EPOCH_DOCUMENTS
            documents = encode_documents(tokenizer, TRAIN_SPLIT, seed, num_documents, stop)
            batches = make_batches(documents, _BATCH_TOKENS, random.Random(f"{seed}/{num_documents}"))
            num_documents = stop
        batch = batches.pop()
        loss = accumulate_gradients(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(learning_rate(elapsed / limit_s))
        step += 1
        num_tokens += sum(int((part != PAD_ID).sum()) for part in batch.parts)
        mean_loss = loss if step == 1 else 0.98 * mean_loss + 0.02 * loss
        now = time.monotonic()
        if now - last_log >= _LOG_EVERY_S:
            speed = (num_tokens - logged_tokens) / (now - last_log)
            left_s = max(0.0, limit_s - (now - started))
            print(
                f"step {step}  loss {mean_loss:.3f}  {speed:.0f} tokens/s  {num_tokens:,} tokens  ETA {left_s:.0f} s",
                flush=True,
            )
            last_log, logged_tokens = now, num_tokens
        if now - last_save >= _SAVE_EVERY_S:
            save_model(model, out)
            last_save = now
    save_model(model, out)
    record = TrainingRecord(
        seed, num_documents, num_tokens, step, round((time.monotonic() - started) / 60, 1), round(mean_loss, 4)
    )
    (out / "training.json").write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    return record


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the bundled demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder to write the checkpoint to")
    parser.add_argument("--minutes", type=float, default=35.0, help="wall-clock minutes, text and tokenizer included")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(train(arguments.out, arguments.minutes, arguments.seed))


if __name__ == "__main__":
    main()
