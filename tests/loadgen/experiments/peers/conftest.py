"""The real worker on made-up libraries: what it asks of OpenVINO is answered without OpenVINO."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

_OPENVINO = """
class Tensor:
    def __init__(self, array):
        (self.ids,) = array.tolist()
"""

# Answers with the prompt's last token, counted up; two tokens per step. Noise on stdout, as libraries like to make.
_GENAI = """
import json, sys

class SchedulerConfig:
    pass

class GenerationConfig:
    pass

class Output:
    def __init__(self, ids):
        self.generated_ids = ids

class Handle:
    def __init__(self, ids, config):
        assert config.ignore_eos and not config.do_sample
        self.left = [ids[-1] + 1 + i for i in range(config.max_new_tokens)]
        self.ready = []

    def can_read(self):
        return bool(self.ready)

    def read(self):
        return {0: self.ready.pop(0)}

class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        print("noise", flush=True)
        if model == "broken":
            raise RuntimeError("cannot read broken")
        print(json.dumps([model, device, vars(scheduler), properties]), file=sys.stderr)
        self.handles = []

    def add_request(self, request_id, tensor, config):
        assert request_id == len(self.handles)
        self.handles.append(Handle(tensor.ids, config))
        return self.handles[-1]

    def has_non_finished_requests(self):
        if any(handle.left for handle in self.handles):
            return True
        self.handles = []
        return False

    def step(self):
        for handle in self.handles:
            handle.ready += [Output([i]) for i in handle.left[:2]]
            del handle.left[:2]
"""

_LAUNCHER = """
import runpy, sys

sys.path.insert(0, {libraries!r})
runpy.run_path({worker!r}, run_name="__main__")
"""


@pytest.fixture
def worker_script(tmp_path: Path) -> Path:
    """A script that runs the worker on the made-up libraries."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "openvino.py").write_text(_OPENVINO)
    (libraries / "openvino_genai.py").write_text(_GENAI)
    script = tmp_path / "launcher.py"
    worker = ROOT / "loadgen" / "experiments" / "peers" / "openvino" / "worker.py"
    script.write_text(_LAUNCHER.format(libraries=str(libraries), worker=str(worker)))
    return script
