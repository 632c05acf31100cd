"""Greedy answers of transformers in fp32 to random prompts, which the pair must give too."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE = 211
"""Tokens of the checkpoints of `checkpoints.py`."""


def save_word_tokenizer(folder: Path) -> None:
    """Saves a tokenizer with one word per token, which engines require in a checkpoint folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))


def random_prompts(lens: Sequence[int]) -> list[list[int]]:
    """Returns prompts of these lengths."""
    import torch

    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lens]


def greedy_answers(
    model: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[tuple[list[int], list[float]]]:
    """Returns what transformers answers to each prompt alone: token ids and their log-probabilities.

    Raises: AssertionError: the answers repeat so few tokens that comparing them would show little.
    """
    import torch
    import transformers

    has_images = "text_config" in json.loads((model / "config.json").read_text())
    auto: Any = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
    oracle: Any = auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    oracle.generation_config.eos_token_id = oracle.config.eos_token_id = None
    answers = []
    for prompt in prompts:
        out = oracle.generate(
            torch.tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_ids = out.sequences[0, len(prompt) :]
        logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
        answers.append((token_ids.tolist(), logprobs.tolist()))
    distinct = {token_id for token_ids, _ in answers for token_id in token_ids}
    assert len(distinct) > 20, "degenerate answers compare little"
    return answers
