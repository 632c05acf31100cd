"""The process that compiles grammars: `python -m frontend.structured.worker`, frames of JSON on stdin and stdout.

    -> {"tokenizer": ..., "vocab_size": ..., "end_token_ids": [...], "memory_bytes": ...}      <- {}
    -> {"kind": ..., "text": ..., "before": ..., "timeout_s": ...}                  <- {"grammar": ...}, again and again

or {"error": ...} in the place of either answer. A grammar that takes too long ends the process by SIGALRM, whether or
not anybody waits for it; one that takes too much memory ends it in whatever way the library dies. Ends with its stdin.
"""

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from llguidance import LLTokenizer

from frontend.structured.forms import FormError, FormKind
from frontend.structured.grammars import check_grammar, grammar_of
from frontend.structured.process import LENGTH, OUT_OF_MEMORY_STATUS

_NICENESS = 5  # answers under way come first


def main() -> None:
    """Serves until stdin ends."""
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):  # a group gets them whole; the frontend says when it is over
        signal.signal(number, signal.SIG_IGN)
    frames, answers = sys.stdin.buffer, sys.stdout.buffer
    hello = _read(frames)
    if hello is None:
        return
    try:
        tokenizer = LLTokenizer(
            hello["tokenizer"], n_vocab=hello["vocab_size"], eos_token=sorted(hello["end_token_ids"])
        )
    except ValueError as error:
        _write(answers, {"error": str(error)})
        return
    _write(answers, {})
    _limit_memory(hello["memory_bytes"])
    while (job := _read(frames)) is not None:
        _write(answers, _answer(job, tokenizer))


def _answer(job: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, str]:
    signal.setitimer(signal.ITIMER_REAL, job["timeout_s"])
    try:
        grammar = grammar_of(FormKind(job["kind"]), job["text"], job["before"])
        check_grammar(grammar, tokenizer)
    except FormError as error:
        return {"error": str(error)}
    except MemoryError:
        sys.exit(OUT_OF_MEMORY_STATUS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return {"grammar": grammar}


def _limit_memory(num_bytes: int) -> None:
    """Limits what is added to the memory in use now, where the system tells that and can."""
    status = Path("/proc/self/status")
    used = re.search(r"^VmSize:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if used is not None:
        limit = int(used[1]) * 1024 + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(frames: BinaryIO) -> dict[str, Any] | None:
    head = frames.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    frame: dict[str, Any] = json.loads(frames.read(length))
    return frame


def _write(answers: BinaryIO, answer: dict[str, str]) -> None:
    data = json.dumps(answer).encode()
    answers.write(LENGTH.pack(len(data)) + data)
    answers.flush()


if __name__ == "__main__":
    main()
