"""The llama.cpp side of a comparison: one JSON request per line on stdin, one JSON answer per line on stdout.

Run by the interpreter of `environment.py`, which has nothing of Chairlift. It drives llama.cpp's C API through the
bindings of llama-cpp-python, and batches as `llama-server -np N` does (tools/server/server-context.cpp, update_slots):

- N slots, a sequence of the KV cache each. A request takes a free slot as soon as there is one, in order of arrival;
  among several, the one whose last tokens share the longest prefix with the prompt, which are not computed again.
- One `llama_decode` per step: the last token of every slot that generates, then prompts in chunks up to `n_batch`
  tokens; llama.cpp divides them into `n_ubatch`. Both are its defaults, as flash attention and the F16 cache are.
- Greedy choices by numpy's argmax over the logits, to the full length.

Times are measured here: nothing of the pipe, of HTTP or of text is in them. `loadgen.experiments.peers.worker` is the
other end.

    {"call": "quantize", "source": ..., "out": ..., "type": "Q8_0" | "Q4_K_M", "threads": n}             -> {}
    {"call": "load", "name": ..., "model": ..., "slots": n, "context": tokens per slot, "threads": n, "cache": "F16" |
     "F32"} -> {}
    {"call": "generate", "name": ..., "prompts": [[ids]], "max_tokens": [n]}
        -> {"token_ids": [[ids]], "token_times_s": [[seconds since the start, one per token]], "wall_s": seconds}
    anything that fails                                                                    -> {"error": ...}
"""

import ctypes
import json
import os
import sys
import time
import traceback
from collections import deque
from itertools import takewhile
from typing import Any, TextIO

import llama_cpp
import numpy as np


def main() -> None:
    """Answers until stdin ends."""
    answers = _own_stdout()
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    """Models by path, and servers by name: those of one model share its weights."""

    def __init__(self) -> None:
        llama_cpp.llama_backend_init()
        self._models: dict[str, Any] = {}
        self._servers: dict[str, Server] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does one call."""
        match request["call"]:
            case "quantize":
                _quantize(request["source"], request["out"], request["type"], request["threads"])
                return {}
            case "load":
                path = request["model"]
                if path not in self._models:
                    self._models[path] = _load(path)
                numbers = {name: request[name] for name in ("slots", "context", "threads", "cache")}
                self._servers[request["name"]] = Server(self._models[path], **numbers)
                return {}
            case "generate":
                return self._servers[request["name"]].generate(request["prompts"], request["max_tokens"])
            case other:
                raise ValueError(f"call is {other!r}, it must be 'quantize', 'load' or 'generate'")


class Slot:
    """A sequence of the KV cache.

    Attributes:
        tokens: whose keys and values are in the cache.
        request: index of the request that it serves; None: free.
        pending: tokens to compute next: what is left of the prompt, or the last choice.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.request: int | None = None
        self.pending: list[int] = []

    def shared(self, prompt: list[int]) -> int:
        """Number of a prompt's first tokens that are in the cache; its last is computed anyway, for the logits."""
        pairs = zip(self.tokens, prompt[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Server:
    """A context with slots.

    Args:
        model: of llama.cpp.
        slots: requests that are computed at once.
        context: tokens that each has room for.
        threads: of every step.
        cache: dtype of keys and values.
    """

    def __init__(self, model: Any, *, slots: int, context: int, threads: int, cache: str) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = slots * context
        params.n_seq_max = slots
        params.n_batch = 2048  # the default of llama.cpp's programs, as that of n_ubatch below
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = {"F32": 0, "F16": 1}[cache]
        params.kv_unified = False  # as with -np: a row's attention reads its own slot
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {slots} slots with {context} tokens each")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = Batch(params.n_batch, slots)
        self._slots = [Slot(index) for index in range(slots)]

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
        """All requests at once, greedy, to their full lengths."""
        token_ids: list[list[int]] = [[] for _ in prompts]
        times_s: list[list[float]] = [[] for _ in prompts]
        waiting = deque(range(len(prompts)))
        started_s = time.perf_counter()
        while waiting or any(slot.request is not None for slot in self._slots):
            while waiting and (free := [slot for slot in self._slots if slot.request is None]):
                request = waiting.popleft()
                prompt = prompts[request]
                self._assign(max(free, key=lambda slot: slot.shared(prompt)), request, prompt)
            chosen = self._step()
            now_s = time.perf_counter() - started_s
            for slot, token in chosen:
                assert slot.request is not None
                answer = token_ids[slot.request]
                answer.append(token)
                times_s[slot.request].append(now_s)
                if len(answer) == max_tokens[slot.request]:
                    slot.request, slot.pending = None, []
                else:
                    slot.pending = [token]
        wall_s = time.perf_counter() - started_s
        return {"token_ids": token_ids, "token_times_s": times_s, "wall_s": wall_s}

    def _assign(self, slot: Slot, request: int, prompt: list[int]) -> None:
        num_shared = slot.shared(prompt)
        llama_cpp.llama_memory_seq_rm(self._memory, slot.index, num_shared, -1)
        slot.request, slot.tokens, slot.pending = request, prompt[:num_shared], prompt[num_shared:]

    def _step(self) -> list[tuple[Slot, int]]:
        """Computes one batch; returns the slots that have a next token, and these."""
        batch = self._batch
        batch.clear()
        busy = [slot for slot in self._slots if slot.request is not None]
        chosen: list[Slot] = []
        # A prompt's last token may be alone too: the order among single tokens does not matter.
        for slot in sorted(busy, key=lambda slot: len(slot.pending) > 1):
            count = min(len(slot.pending), batch.room)
            if count == 0:
                break
            is_last = count == len(slot.pending)
            batch.add(slot.pending[:count], slot.index, len(slot.tokens), is_last)
            slot.tokens += slot.pending[:count]
            slot.pending = slot.pending[count:]
            if is_last:
                chosen.append(slot)
        status = llama_cpp.llama_decode(self._context, batch.struct)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {batch.struct.n_tokens} tokens")
        if not chosen:
            return []
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(len(chosen), self._num_tokens))
        return list(zip(chosen, logits.argmax(axis=1).tolist(), strict=True))


class Batch:
    """llama.cpp's `llama_batch` over arrays that are filled whole."""

    def __init__(self, num_tokens: int, num_slots: int) -> None:
        self._ids = np.arange(num_slots, dtype=np.int32)  # what the pointers of `_slots` point to
        self._tokens = np.zeros(num_tokens, dtype=np.int32)
        self._positions = np.zeros(num_tokens, dtype=np.int32)
        self._counts = np.ones(num_tokens, dtype=np.int32)
        self._slots = np.zeros(num_tokens, dtype=np.uintp)
        self._outputs = np.zeros(num_tokens, dtype=np.int8)
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=_pointer(self._slots, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    @property
    def room(self) -> int:
        """Tokens that can be added."""
        return len(self._tokens) - int(self.struct.n_tokens)

    def clear(self) -> None:
        """Takes all tokens out."""
        self.struct.n_tokens = 0

    def add(self, tokens: list[int], slot: int, position: int, with_logits: bool) -> None:
        """Adds tokens of a slot, the first of them at a position; logits are of the last one, if at all."""
        start = int(self.struct.n_tokens)
        stop = start + len(tokens)
        self._tokens[start:stop] = tokens
        self._positions[start:stop] = np.arange(position, position + len(tokens))
        self._slots[start:stop] = self._ids.ctypes.data + slot * self._ids.itemsize
        self._outputs[start:stop] = 0
        self._outputs[stop - 1] = with_logits
        self.struct.n_tokens = stop


def _pointer(array: Any, item: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(item))


def _load(path: str) -> Any:
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    return model


def _quantize(source: str, out: str, kind: str, threads: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}[kind]
    params.nthread = threads
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status} for {source}")


def _own_stdout() -> TextIO:
    """The pipe, for answers only: whatever else is printed, by libraries too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
