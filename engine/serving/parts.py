"""A loaded model with everything around it, before it is served. Imports no gRPC: benchmarks run it without servers."""

from collections.abc import Callable
from dataclasses import dataclass

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.scheduler import Scheduler
from engine.interfaces import ModelRunner
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.adapters import AdapterLoader
from engine.serving.matcher_compiler import MatcherCompiler


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says about itself, for gateways.

    Attributes:
        path: its folder or file.
        model_type, architectures: of config.json.
        bos_token_id, pad_token_id: of config.json; 0: none.
    """

    path: str = ""
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    bos_token_id: int = 0
    pad_token_id: int = 0


NO_CHECKPOINT_INFO = CheckpointInfo()


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded model, ready to serve.

    Attributes:
        info: model and limits, sent to frontends.
        max_open_requests: most open requests of all frontends together.
        grammars: compiles the grammars of requests.
        num_late_compiles: number of kernels compiled in this process since the engine was ready.
        progress: returns a value that changes during a step; may be called by any thread at any time. None if no such
            value exists, as on a GPU.
        num_adapter_slots: slots of adapters; those of `info` are in the first ones.
        load_adapter: loads adapters at run time; None: it is not allowed.
        checkpoint: describes the model's files.
    """

    scheduler: Scheduler
    runner: ModelRunner
    info: pb.EngineInfo
    tokenizer: TokenizerFiles
    max_open_requests: int
    grammars: MatcherCompiler
    num_late_compiles: Callable[[], int] = lambda: 0
    progress: Callable[[], object] | None = None
    num_adapter_slots: int = 0
    load_adapter: AdapterLoader | None = None
    checkpoint: CheckpointInfo = NO_CHECKPOINT_INFO
