"""OpenVINO GenAI's pipelines for one checkpoint in one precision, loaded and ready to compete."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from chairlift.bench.benchmark import Settings
from engine.config import DEFAULT_STEP_LIMITS
from loadgen.experiments.contest import Contender
from loadgen.experiments.peers.openvino.environment import convert_checkpoint, openvino_python
from loadgen.experiments.peers.openvino.process import OpenVinoProcess

OPENVINO = "OpenVINO"
OPENVINO_CACHED = "OpenVINO, prefix cache"

# fp32 is asked for, as CPUs with bf16 would compute in it; int8 weights and a u8 cache are what it does by itself.
_PROPERTIES: Final[Mapping[str, Mapping[str, object]]] = {
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {"KV_CACHE_PRECISION": "u8"},
}
_CACHE_GB = 2  # the workloads need 1 GB at most


@contextlib.contextmanager
def open_openvino(precision: str, checkpoint: Path, settings: Settings) -> Iterator[dict[str, Contender]]:
    """Converts the checkpoint and loads it twice, without and with a prefix cache, for the length of a with block.

    Steps have as many tokens as Chairlift's. `max_num_seqs` is left alone: with dynamic_split_fuse, its default,
    OpenVINO ignores it (64, 2, 64 and 2 took 2.55, 2.70, 2.67 and 2.65 s) and runs all requests at once.

    Raises: BenchmarkError: no environment, or the conversion or the load fails.
    """
    python = openvino_python(settings.progress)
    settings.progress(f"converting {checkpoint.name} to OpenVINO, {precision}")
    model_dir = settings.scratch / f"{checkpoint.name}-openvino-{precision}"
    convert_checkpoint(python, checkpoint, model_dir, precision)
    limits = DEFAULT_STEP_LIMITS["cpu"]
    properties = {"INFERENCE_NUM_THREADS": settings.threads, **_PROPERTIES[precision]}
    with OpenVinoProcess(python, settings.scratch / f"openvino-{precision}.log") as process:
        pipelines: dict[str, Contender] = {}
        for name, enable_prefix_caching in ((OPENVINO, False), (OPENVINO_CACHED, True)):
            scheduler = {
                "cache_size": _CACHE_GB,
                "enable_prefix_caching": enable_prefix_caching,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
            }
            pipelines[name] = process.load(name, model_dir, properties=properties, scheduler=scheduler)
        yield pipelines
