"""OpenVINO GenAI's pipelines for one checkpoint in one number format, as systems under test."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from chairlift.bench.benchmark import Settings
from loadgen.experiments.peers.formats import NumberFormat, Terms
from loadgen.experiments.peers.openvino.environment import convert_checkpoint, openvino_python
from loadgen.experiments.peers.worker import Worker, WorkerSystem
from loadgen.experiments.systems import System

_SCRIPT = Path(__file__).with_name("worker.py")
OPENVINO = "OpenVINO"
OPENVINO_CACHED = "OpenVINO, prefix cache"

# fp32 is explicit, as CPUs with bf16 would compute in it; int8 weights and a u8 cache are its defaults. For weights in
# bf16 the precision is its default on this CPU, and the cache has that of ours.
_PROPERTIES: Final[Mapping[str, Mapping[str, object]]] = {
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {"KV_CACHE_PRECISION": "u8"},
    "bf16": {"KV_CACHE_PRECISION": "bf16"},
}
# In bf16 the plugin converts the weights, as it does by default.
_WEIGHT_FORMATS: Final[Mapping[str, str]] = {"fp32": "fp32", "int8": "int8", "bf16": "fp32"}
_CACHE_GB = 2  # the workloads need 1 GB at most


@contextlib.contextmanager
def open_openvino(
    number_format: NumberFormat, model: Path, terms: Terms, settings: Settings
) -> Iterator[dict[str, System]]:
    """Converts the checkpoint and loads it twice, without and with a prefix cache, for the length of a `with` block.

    `max_num_seqs` keeps its default: with dynamic_split_fuse, its default, OpenVINO ignores it (64, 2, 64 and 2 took
    2.55, 2.70, 2.67 and 2.65 s) and runs all requests at once.

    Args:
        number_format: fp32, int8 or bf16.
        model: a checkpoint saved by `transformers`.
        terms: token budget of a step.
        settings: threads and scratch folder.
    Raises: BenchmarkError: no environment, or the conversion or the load fails.
    """
    python = openvino_python(settings.progress)
    name = number_format.name
    settings.progress(f"converting {model.name} to OpenVINO, {name}")
    model_dir = settings.scratch / f"{model.name}-openvino-{name}"
    convert_checkpoint(python, model, model_dir, _WEIGHT_FORMATS[name])
    properties = {"INFERENCE_NUM_THREADS": settings.threads, **_PROPERTIES[name]}
    # -I: neither our packages nor this folder, which is called openvino, are on its path.
    with Worker([python, "-I", _SCRIPT], settings.scratch / f"openvino-{name}.log") as worker:
        systems: dict[str, System] = {}
        for system, enable_prefix_caching in ((OPENVINO, False), (OPENVINO_CACHED, True)):
            scheduler = {
                "cache_size": _CACHE_GB,
                "enable_prefix_caching": enable_prefix_caching,
                "max_num_batched_tokens": terms.step_tokens,
            }
            worker.call("load", name=system, model=str(model_dir), properties=properties, scheduler=scheduler)
            systems[system] = WorkerSystem(worker, name=system)
        yield systems
