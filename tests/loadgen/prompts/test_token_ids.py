import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loadgen.errors import OptionError, TraceError
from loadgen.prompts.token_ids import PromptMaker, Vocabulary
from loadgen.trace.schema import Accounting, Blocks, Trace
from tests.hang import HANG_S

MASK = (1 << 64) - 1
VOCABULARY = Vocabulary(50_000, frozenset({0, 1, 2}))


def trace(input_tokens: list[int], block_ids: list[list[int]] | None = None, block_tokens: int = 8) -> Trace:
    count = len(input_tokens)
    blocks = None
    if block_ids is not None:
        offsets = np.cumsum([0] + [len(ids) for ids in block_ids])
        blocks = Blocks(np.array([i for ids in block_ids for i in ids], dtype=np.int64), offsets, block_tokens)
    return Trace(
        name="made up",
        format="jsonl",
        digest="d" * 64,
        arrival_s=np.arange(count, dtype=np.float64),
        input_tokens=np.array(input_tokens, dtype=np.int64),
        output_tokens=np.ones(count, dtype=np.int64),
        rows=np.arange(count, dtype=np.int64),
        accounting=Accounting(count),
        blocks=blocks,
    )


def prompts(workload: Trace, salt: str = "salt", vocabulary: Vocabulary = VOCABULARY) -> list[list[int]]:
    maker = PromptMaker(salt, workload, vocabulary)
    return [maker.token_ids(index).tolist() for index in range(len(workload))]


def shared(first: list[int], second: list[int]) -> int:
    """Tokens that two prompts begin with alike."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def test_the_numbers_are_those_of_splitmix64() -> None:
    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
        return word ^ (word >> 31)

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    golden, size = 0x9E3779B97F4A7C15, 49_997
    key = int.from_bytes(hashlib.sha256(b"block\0salt\0" + b"d" * 64).digest()[:8], "little")
    block = mix((key + 7 * golden) & MASK)
    numbers = [mix((block + (position + 1) * golden) & MASK) for position in range(8)]
    assert prompts(trace([5], [[7]])) == [[3 + ((number >> 32) * size >> 32) for number in numbers[:5]]]


def test_prompts_have_exactly_their_lengths() -> None:
    lengths = [1, 7, 8, 9, 16, 1000, 3]
    assert [len(prompt) for prompt in prompts(trace(lengths))] == lengths
    rows = [[100 * i + j for j in range(-(-length // 8))] for i, length in enumerate(lengths)]
    assert [len(prompt) for prompt in prompts(trace(lengths, rows))] == lengths


def test_prompts_share_exactly_the_blocks_they_have_in_common() -> None:
    made = prompts(trace([24, 24, 24, 24], [[1, 2, 3], [1, 2, 4], [1, 5, 6], [7, 8, 9]]))
    assert [shared(made[0], other) for other in made[1:]] == [16, 8, 0]


def test_a_cut_block_is_the_beginning_of_the_full_one() -> None:
    full, cut, longer = prompts(trace([16, 11, 20], [[1, 2], [1, 2], [1, 2, 3]]))
    assert cut == full[:11]
    assert longer[:16] == full


def test_prompts_without_blocks_share_nothing() -> None:
    made = prompts(trace([64] * 50))
    windows = {tuple(prompt[i : i + 4]) for prompt in made for i in range(61)}
    assert len(windows) == 50 * 61
    mixed = prompts(trace([16, 16, 16], [[1, 2], [], []]))
    assert max(shared(mixed[0], mixed[1]), shared(mixed[1], mixed[2])) < 4


def test_a_row_without_blocks_keeps_its_prompt_when_others_are_cut_away() -> None:
    whole = trace([10, 20, 30])
    assert prompts(whole.take(np.array([2]), "cut")) == prompts(whole)[2:]


def test_a_new_salt_or_another_trace_shares_no_block() -> None:
    workload = trace([64] * 20, [[i, 100 + i] for i in range(20)], block_tokens=32)
    made = prompts(workload) + prompts(workload, salt="other")
    blocks = {tuple(prompt[i : i + 32]) for prompt in made for i in (0, 32)}
    assert len(blocks) == 2 * 40
    windows = [{tuple(p[i : i + 4]) for p in half for i in range(61)} for half in (made[:20], made[20:])]
    assert not windows[0] & windows[1]


def test_special_ids_never_appear_and_all_others_do() -> None:
    vocabulary = Vocabulary(40, frozenset({0, 7, 39}), first_id=2)
    (prompt,) = prompts(trace([5000]), vocabulary=vocabulary)
    assert set(prompt) == set(range(2, 39)) - {7}
    counts = np.bincount(prompt, minlength=40)[sorted(set(prompt))]
    assert counts.min() > 90  # 139 +- 4 standard deviations of 11.6
    assert counts.max() < 190


def test_an_unstated_vocabulary_avoids_the_ends_of_the_usual_ones() -> None:
    vocabulary = Vocabulary.of(None, frozenset({2000}))
    assert (vocabulary.ids.min(), vocabulary.ids.max(), len(vocabulary.ids)) == (1000, 29_999, 28_999)
    assert Vocabulary.of(10, frozenset({9})).ids.tolist() == list(range(9))


def test_a_common_vocabulary_is_the_smallest_and_unstated_ones_have_the_usual_size() -> None:
    special = frozenset({5})
    assert Vocabulary.common([50_000, 300], special) == Vocabulary(300, special)
    assert Vocabulary.common([50_000, None], special) == Vocabulary(30_000, special)
    assert Vocabulary.common([None, 300], special) == Vocabulary(300, special)
    assert Vocabulary.common([None, None], special) == Vocabulary.of(None, special)


def test_too_small_a_vocabulary_and_too_few_blocks_are_refused() -> None:
    with pytest.raises(OptionError, match="3 tokens without the 2 special ones has 1 left"):
        Vocabulary(3, frozenset({0, 1}))
    with pytest.raises(TraceError, match="row 0: 1 blocks of 8 tokens do not make a prompt of 9"):
        prompts(trace([9], [[1]]))


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_prompts_are_the_same_in_every_process(hash_seed: str) -> None:
    code = (
        "import hashlib, numpy as np\n"
        "from loadgen.prompts.token_ids import PromptMaker, Vocabulary\n"
        "from loadgen.trace.schema import Accounting, Blocks, Trace\n"
        "blocks = Blocks(np.array([5, 6, 7, 5, 6, 8, 9]), np.array([0, 3, 7]), 8)\n"
        "ones = np.ones(2, np.int64)\n"
        "trace = Trace('x', 'jsonl', 'd' * 64, np.zeros(2), np.array([20, 30]), ones, ones, Accounting(2), blocks)\n"
        "maker = PromptMaker('salt', trace, Vocabulary(50_000, frozenset({0, 1, 2})))\n"
        "ids = np.concatenate([maker.token_ids(0), maker.token_ids(1)])\n"
        "print(hashlib.sha256(ids.astype('<u4').tobytes()).hexdigest())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=HANG_S
    ).stdout
    made = prompts(trace([20, 30], [[5, 6, 7], [5, 6, 8, 9]]))
    here = hashlib.sha256(np.array(made[0] + made[1], dtype="<u4").tobytes()).hexdigest()
    assert printed.strip() == here == "815f57f83fe565fcedfffea30a057dbcff34d4658a70ed7ff25dcae3e1cb5ee8"


class InfiniteCache:
    """Sees prompts only, as a server does: blocks of tokens, each under all that came before it."""

    def __init__(self, block_tokens: int) -> None:
        self._block_bytes = 4 * block_tokens
        self._children: dict[bytes, set[bytes]] = {}  # digest of a prefix -> the blocks that followed it

    def cached_tokens(self, prompt: bytes) -> int:
        """Tokens at the beginning that an earlier prompt had too; a cut last block counts if a block begins with it."""
        cached, prefix, hit = 0, b"", True
        for start in range(0, len(prompt), self._block_bytes):
            block = prompt[start : start + self._block_bytes]
            siblings = self._children.setdefault(prefix, set())
            if len(block) == self._block_bytes:
                hit = hit and block in siblings
            else:
                hit = hit and any(other.startswith(block) for other in siblings)
            cached += len(block) // 4 if hit else 0
            siblings.add(block)
            prefix = hashlib.sha256(prefix + block).digest()
        return cached


@pytest.mark.parametrize(
    ("name", "reuse"), [("mooncake_arxiv_first1000", 0.3907), ("mooncake_fast25_conversation", 0.3736)]
)
def test_a_cache_hits_prompts_as_often_as_the_trace_says(name: str, reuse: float) -> None:
    folder = os.environ.get("CHAIRLIFT_TRACES")
    if not folder:
        pytest.skip("CHAIRLIFT_TRACES names no folder with the stored traces")
    with gzip.open(Path(folder) / f"{name}.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    block_tokens = 32  # of 512: an eighth of a trace's tokens makes the same reuse, sooner
    lengths = [-(-row["input_length"] * block_tokens // 512) for row in rows]
    workload = trace(lengths, [row["hash_ids"] for row in rows], block_tokens)

    seen: set[int] = set()
    expected = []
    for length, row in zip(lengths, rows, strict=True):
        hits = next((k for k, block_id in enumerate(row["hash_ids"]) if block_id not in seen), len(row["hash_ids"]))
        expected.append(min(length, hits * block_tokens))
        seen.update(row["hash_ids"])

    cache, maker = InfiniteCache(block_tokens), PromptMaker("salt", workload, VOCABULARY)
    found = [cache.cached_tokens(maker.token_ids(index).tobytes()) for index in range(len(workload))]
    assert found == expected
    assert sum(found) / sum(lengths) == pytest.approx(reuse, abs=5e-4)
    fresh = PromptMaker("another salt", workload, VOCABULARY)  # finds nothing of the first run
    assert [cache.cached_tokens(fresh.token_ids(index).tobytes()) for index in range(len(workload))] == expected
