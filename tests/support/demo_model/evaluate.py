"""Measures the demo model against what it promises, prints each figure with its bound, writes them beside the model.

    python -m tests.support.demo_model.evaluate [--model DIR] [--prompts 200] [--seed 1] [--show 10]

Exit code 1 if any figure misses its bound. The prompts and the held-out text come from a split that training never
draws from; the training text itself is drawn again from the seed that training.json names.
"""

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from engine.demo import MODEL_DIR
from tests.support.demo_model.corpus import END_ID, PAD_ID, TRAIN_SPLIT, encode_documents, rendered, spoken_texts
from tests.support.demo_model.ngram import TrigramModel
from tests.support.demo_model.novelty import RUN_WORDS, RunIndex, words_of
from tests.support.demo_model.prompts import HELD_OUT_SPLIT, HeldOutPrompt, PromptKind, heldout_prompts

TEMPERATURE = 0.8
MAX_NEW_TOKENS = 512
MAX_SIZE_BYTES = 16_000_000
_BATCH_PROMPTS = 50
_LOSS_DOCUMENTS = 500
_DIGEST_DOCUMENTS = 500


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure and the bound it has to meet."""

    name: str
    value: float
    bound: float
    at_least: bool

    @property
    def passed(self) -> bool:
        """Whether the value is on the right side of the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model made of one prompt; `num_tokens` leaves the end token out."""

    prompt: HeldOutPrompt
    text: str
    num_tokens: int
    ended: bool


def encode_prompt(tokenizer: Any, prompt: HeldOutPrompt) -> list[int]:
    """The token ids a server would send: plain text as it is, a chat message through the template."""
    text = prompt.text
    if prompt.kind is PromptKind.CHAT:
        message = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@torch.inference_mode()
def sample_answers(model: LlamaForCausalLM, tokenizer: Any, prompts: list[HeldOutPrompt]) -> list[Answer]:
    """Sample one answer a prompt at TEMPERATURE from the full distribution, in one batch padded on the left."""
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    width = max(len(ids) for ids in encoded)
    tokens = torch.full((len(encoded), width), PAD_ID)
    generate = getattr(model, "generate")  # noqa: B009 - its stub does not accept its own class
    for row, ids in enumerate(encoded):
        tokens[row, width - len(ids) :] = torch.tensor(ids)
    output: torch.Tensor = generate(
        input_ids=tokens,
        attention_mask=(tokens != PAD_ID).long(),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    answers = []
    for prompt, row in zip(prompts, output[:, width:].tolist(), strict=True):
        ended = END_ID in row
        ids = row[: row.index(END_ID)] if ended else row
        answers.append(Answer(prompt, tokenizer.decode(ids), len(ids), ended))
    return answers


@torch.inference_mode()
def model_loss(model: LlamaForCausalLM, documents: list[NDArray[np.int64]]) -> float:
    """Mean cross entropy, in nats a token, of every token after a document's first."""
    total, count = 0.0, 0
    for document in documents:
        tokens = torch.from_numpy(document).unsqueeze(0)
        logits = model(input_ids=tokens[:, :-1]).logits[0].float()
        total += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += tokens.shape[1] - 1
    return total / count


def text_digest(seed: int) -> str:
    """SHA-256 of the first training documents: changes when the generator no longer draws the text of the model."""
    digest = hashlib.sha256()
    for text in rendered(TRAIN_SPLIT, seed, 0, _DIGEST_DOCUMENTS):
        digest.update(text.encode())
    return digest.hexdigest()


def size_bytes(model_dir: Path) -> int:
    """What all files of the model weigh together."""
    return sum(path.stat().st_size for path in model_dir.rglob("*") if path.is_file())


def answer_figures(answers: list[Answer], training_runs: RunIndex) -> list[Figure]:
    """The figures that the sampled answers decide."""
    lengths = [answer.num_tokens for answer in answers]
    low, high = (float(np.percentile(lengths, percent)) for percent in (10, 90))
    novel = [not training_runs.copies_run(answer.text) for answer in answers]
    words = [word for answer in answers for word in words_of(answer.text)]
    return [
        Figure(f"answers that end before {MAX_NEW_TOKENS} tokens", _share([a.ended for a in answers]), 0.95, True),
        Figure("p90 / p10 of the answer lengths", high / max(low, 1.0), 5.0, True),
        Figure("distinct answers", len({answer.text for answer in answers}) / len(answers), 0.9, True),
        Figure(f"answers without a copied run of {RUN_WORDS} words", _share(novel), 0.8, True),
        Figure(
            "words that the training text knows", _share([training_runs.knows_word(word) for word in words]), 0.98, True
        ),
    ]


def _share(flags: list[bool]) -> float:
    return sum(flags) / max(len(flags), 1)


def evaluate(model_dir: Path, num_prompts: int, seed: int) -> tuple[list[Figure], list[Answer], dict[str, float]]:
    """Every figure, the answers behind them, and plain facts about the run."""
    training = json.loads((model_dir / "training.json").read_text(encoding="utf-8"))
    train_seed, num_documents = int(training["seed"]), int(training["num_documents"])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    fast = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.train(mode=False)
    torch.manual_seed(seed)
    prompts = heldout_prompts(num_prompts, seed)
    answers: list[Answer] = []
    for start in range(0, num_prompts, _BATCH_PROMPTS):
        answers += sample_answers(model, tokenizer, prompts[start : start + _BATCH_PROMPTS])
        print(f"{len(answers)} of {num_prompts} answers sampled", flush=True)
    training_runs = RunIndex(spoken_texts(TRAIN_SPLIT, train_seed, 0, num_documents))
    figures = answer_figures(answers, training_runs)
    held_out = [ids.astype(np.int64) for ids in encode_documents(fast, HELD_OUT_SPLIT, seed + 1, 0, _LOSS_DOCUMENTS)]
    train_ids = [ids.astype(np.int64) for ids in encode_documents(fast, TRAIN_SPLIT, train_seed, 0, num_documents)]
    baseline = TrigramModel(train_ids, fast.get_vocab_size()).loss(held_out)
    figures.append(
        Figure("held-out loss in nats a token, 3-gram baseline as bound", model_loss(model, held_out), baseline, False)
    )
    figures.append(Figure("size of all files in bytes", size_bytes(model_dir), MAX_SIZE_BYTES, False))
    lengths = [answer.num_tokens for answer in answers]
    facts = {f"length_p{percent}": float(np.percentile(lengths, percent)) for percent in (10, 50, 90)}
    facts |= {"longest": float(max(lengths)), "training_runs": float(len(training_runs))}
    return figures, answers, facts


def main() -> int:
    """Evaluate, print, write evaluation.json; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description="Measure the bundled demo model against its bounds.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the checkpoint")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="answers to print in full")
    arguments = parser.parse_args()
    started = time.monotonic()
    figures, answers, facts = evaluate(arguments.model, arguments.prompts, arguments.seed)
    for answer in answers[: arguments.show]:
        print(f"--- {answer.prompt.kind.value}: {answer.prompt.text}\n{answer.text}\n[{answer.num_tokens} tokens]")
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        verdict = "PASS" if figure.passed else "FAIL"
        print(f"{verdict}  {figure.name}: {figure.value:.4g}  (bound {sign} {figure.bound:.4g})")
    seed = int(json.loads((arguments.model / "training.json").read_text(encoding="utf-8"))["seed"])
    report = {
        "num_prompts": arguments.prompts,
        "seed": arguments.seed,
        "temperature": TEMPERATURE,
        "text_sha256": text_digest(seed),
        "figures": [asdict(figure) | {"passed": figure.passed} for figure in figures],
        "facts": facts,
    }
    (arguments.model / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if all(figure.passed for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
