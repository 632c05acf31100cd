"""Checks greedy ids against `transformers` on the same checkpoint, see `chairlift.bench.agreement`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from chairlift.bench.agreement import NEAR_TIE, Agreement
from engine.bench.transformers_peer import import_transformers


@torch.inference_mode()
def greedy_agreement(
    model: Any, prompts: Sequence[Sequence[int]], output_ids: Sequence[Sequence[int]], *, near_tie: float = NEAR_TIE
) -> Agreement:
    """Checks greedy answers with one forward pass of prompt and answer each.

    Args:
        model: a causal model of `transformers` in fp32, see `load_reference`, on any device.
        prompts: token ids.
        output_ids: the answers.
        near_tie: difference of logits that rounding may reverse.
    """
    num_tokens = num_same = num_near = 0
    worst_gap = 0.0
    for prompt, answer in zip(prompts, output_ids, strict=True):
        logits = answer_logits(model, prompt, answer)
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        gaps = logits.max(dim=1).values - chosen
        same = logits.argmax(dim=1) == torch.tensor(answer)
        num_tokens += len(answer)
        num_same += int(same.sum())
        num_near += int((~same & (gaps <= near_tie)).sum())
        worst_gap = max(worst_gap, float(gaps.max()))
    return Agreement(num_tokens, num_same, num_near, worst_gap)


@torch.inference_mode()
def answer_logits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Returns the logits from which each token of an answer was chosen: [len(answer), vocab_size] fp32, on the CPU."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    return cast("torch.Tensor", model(ids[:, :-1], logits_to_keep=len(answer)).logits[0].float().cpu())


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Loads the checkpoint in `transformers`."""
    return import_transformers().AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
