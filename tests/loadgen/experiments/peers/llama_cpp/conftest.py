"""The real worker on a made-up library: what it asks of llama.cpp is answered without llama.cpp."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]

# Chooses the sum of all tokens of a sequence, modulo the vocabulary of 97: a wrong cache gives a wrong choice. Says on
# stderr what it was asked. Noise on stdout, as libraries like to make.
_LLAMA_CPP = """
import ctypes, json, sys

LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_Q4_K_M = 7, 15
VOCAB = 97

class llama_batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]

class Params(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int), ("nthread", ctypes.c_int)]

class Options:
    pass

class Context:
    def __init__(self, options):
        self.options = options
        self.sequences = [[] for _ in range(options.n_seq_max)]

def say(*what):
    print(json.dumps(what), file=sys.stderr, flush=True)

def llama_backend_init():
    print("noise", flush=True)

def llama_model_default_params():
    return Options()

def llama_context_default_params():
    return Options()

def llama_model_quantize_default_params():
    return Params()

def llama_model_quantize(source, out, params):
    say("quantize", source.decode(), out.decode(), params._obj.ftype, params._obj.nthread)
    return int(b"broken" in source)

def llama_model_load_from_file(path, params):
    say("model", path.decode())
    return None if b"broken" in path else path

def llama_init_from_model(model, params):
    say("context", vars(params))
    return Context(params)

def llama_get_memory(context):
    return context

def llama_model_get_vocab(model):
    return model

def llama_vocab_n_tokens(vocab):
    return VOCAB

def llama_memory_seq_rm(memory, sequence, start, stop):
    assert stop == -1
    del memory.sequences[sequence][start:]

def llama_decode(context, batch):
    assert 0 < batch.n_tokens <= context.options.n_batch
    rows, counts = [], {}
    for index in range(batch.n_tokens):
        assert batch.n_seq_id[index] == 1
        slot = batch.seq_id[index][0]
        tokens = context.sequences[slot]
        assert batch.pos[index] == len(tokens)
        tokens.append(batch.token[index])
        if len(tokens) > context.options.n_ctx // context.options.n_seq_max:
            return 1
        counts[slot] = counts.get(slot, 0) + 1
        if batch.logits[index]:
            rows.append(sum(tokens) % VOCAB)
    logits = [float(column == row) for row in rows for column in range(VOCAB)]
    context.logits = (ctypes.c_float * len(logits))(*logits)
    say("batch", counts)
    return 0

def llama_get_logits(context):
    return ctypes.cast(context.logits, ctypes.POINTER(ctypes.c_float))
"""

_LAUNCHER = """
import runpy, sys

sys.path.insert(0, {libraries!r})
runpy.run_path({worker!r}, run_name="__main__")
"""


@pytest.fixture
def worker_script(tmp_path: Path) -> Path:
    """A script that runs the worker on the made-up library."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "llama_cpp.py").write_text(_LLAMA_CPP)
    script = tmp_path / "launcher.py"
    worker = ROOT / "loadgen" / "experiments" / "peers" / "llama_cpp" / "worker.py"
    script.write_text(_LAUNCHER.format(libraries=str(libraries), worker=str(worker)))
    return script
