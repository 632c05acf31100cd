"""Converts a checkpoint with mlx-lm and prints its greedy answers; runs in an environment that has mlx-lm.

Usage: mlx_lm_answers.py ORIGINAL CONVERTED BITS GROUP_SIZE NUM_TOKENS; prompts of token ids come as JSON on stdin.
"""

import contextlib
import json
import sys

import mlx.core as mx  # type: ignore[import-not-found]
from mlx_lm import convert, load  # type: ignore[import-not-found]


def main() -> None:
    original, converted, *numbers = sys.argv[1:]
    num_bits, group_size, num_tokens = map(int, numbers)
    with contextlib.redirect_stdout(sys.stderr):
        convert(original, converted, quantize=True, q_bits=num_bits, q_group_size=group_size, dtype="float32")
        model, _ = load(converted)
    answers = []
    for prompt in json.load(sys.stdin):
        token_ids = list(prompt)
        for _ in range(num_tokens):
            logits = model(mx.array([token_ids]))[0, -1]
            token_ids.append(int(mx.argmax(logits)))
        answers.append(token_ids[len(prompt) :])
    json.dump(answers, sys.stdout)


main()
