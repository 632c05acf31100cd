"""Are the greedy ids right? Judged by `transformers` on the same checkpoint, position by position.

Two correct programs add in different orders, so where the two best logits are closer than rounding error either token
is right, and everything after it differs. Each position is therefore judged on its own, after the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.hugging_face import import_transformers

# Logits here are near unit scale; fp32 sums of a few thousand terms differ by about 1e-5.
NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Agreement:
    """How answers compare with the reference's own choice at each of their positions.

    Attributes:
        num_tokens: positions compared.
        num_same: positions with the reference's token.
        num_near_ties: of the others, those where it is at most NEAR_TIE behind the reference's best.
        worst_gap: how far behind the worst choice is, in logits.
    """

    num_tokens: int
    num_same: int
    num_near_ties: int
    worst_gap: float

    @property
    def num_wrong(self) -> int:
        """Positions where the token is wrong."""
        return self.num_tokens - self.num_same - self.num_near_ties

    @property
    def share_same(self) -> float:
        """Share of positions with the reference's token."""
        return self.num_same / self.num_tokens

    def __str__(self) -> str:
        return (
            f"{self.num_same} of {self.num_tokens} ids are transformers', {self.num_near_ties} are near-ties, "
            f"worst gap {self.worst_gap:.2g}"
        )


@torch.inference_mode()
def greedy_agreement(
    model: Any, prompts: Sequence[Sequence[int]], output_ids: Sequence[Sequence[int]], *, near_tie: float = NEAR_TIE
) -> Agreement:
    """Judges greedy answers, one forward of prompt and answer each.

    Args:
        model: a causal model of `transformers` in fp32, see `load_reference`.
        prompts: token ids.
        output_ids: the answers.
        near_tie: logits apart that rounding may turn around.
    """
    num_tokens = num_same = num_near = 0
    worst_gap = 0.0
    for prompt, answer in zip(prompts, output_ids, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(ids[:, :-1], logits_to_keep=len(answer)).logits[0].float()  # [len(answer), vocab_size]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        gaps = logits.max(dim=1).values - chosen
        same = logits.argmax(dim=1) == torch.tensor(answer)
        num_tokens += len(answer)
        num_same += int(same.sum())
        num_near += int((~same & (gaps <= near_tie)).sum())
        worst_gap = max(worst_gap, float(gaps.max()))
    return Agreement(num_tokens, num_same, num_near, worst_gap)


def require_same_ids(name: str, agreement: Agreement) -> None:
    """Speed is worth nothing if the answers are wrong.

    Raises: BenchmarkError: a position has a token that rounding cannot explain.
    """
    if agreement.num_wrong:
        raise BenchmarkError(f"{name}: {agreement.num_wrong} ids are wrong; {agreement}")


def load_reference(path: Path) -> Any:
    """The checkpoint in `transformers`, fp32."""
    return import_transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
