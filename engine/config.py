"""The engine's configuration as one frozen value; `engine/flags.py` makes it from flags and environment."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from engine.core.config import SchedulingPolicyName
from engine.demo import MODEL_DIR
from engine.errors import ConfigError

DEMO_MODEL_NAME = "chairlift-demo"

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "fp8"]
KVCacheDtypeName = Literal["auto", "int8", "fp8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]


class StepLimits(NamedTuple):
    """How much one step may hold: requests and tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int


# A CPU computes 1/100 of a GPU's tokens per second: steps are kept as much smaller as a stream of tokens needs to stay
# smooth.
DEFAULT_STEP_LIMITS = {"cpu": StepLimits(64, 512), "cuda": StepLimits(256, 2048)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user has chosen; None where the default depends on the model or the device.

    Attributes:
        model: a folder or an id on the Hugging Face hub.
        served_model_name: the name frontends see; by default the folder's, the id, or "chairlift-demo" for the bundled
            one.
        uds: path of a unix socket to listen on instead of host and port.
        tls_cert, tls_key, tls_client_ca: for host and port; frontends must show a certificate that the last has signed.
        insecure_bind: listen in the clear on an address that other machines can reach.
        max_num_seqs, max_num_batched_tokens: see `step_limits`.
        gpu_memory_utilization: share of a GPU's memory to use in all.
        kv_cache_memory_bytes: size of the KV cache; overrides gpu_memory_utilization.
        num_gpu_blocks_override: blocks of KV cache; overrides both.
        max_model_len: most tokens of prompt and output; None is the model's, cut to what the cache can hold.
        max_num_queued_reqs: requests that may wait; more are rejected.
        enforce_eager: launch every kernel of every step, without CUDA graphs.
        async_scheduling: schedule and launch a step while the one before it runs; None: on a GPU only.
        threads: CPU threads of each process of the model; None divides the cores among them.
        quantization: of the weights of linear layers, on load; None computes with the weights as they are. int8 is a
            CPU's, fp8 a GPU's; so with kv_cache_dtype.
        kv_cache_dtype: auto is the model's own.
        batch_invariant: a request's logits are the same bits whatever else is in its batches, or the engine refuses.
        shutdown_timeout_s: how long a drain may take.
        step_log: file for one JSON line per step.
        integrity_check_interval_s: pause between two looks through the scheduler's books; 0: none. One takes 8 ms of a
            core (AMD EPYC) with 256 running requests and 27,000 blocks, 17 ms with 100,000: 0.03 % and 0.06 % of 30 s.
        exit_on_stdin_close: end when standard input closes, that is when the parent process is gone.
        tensor_parallel_size: processes that the model is divided among.
        rank_timeout_s: how long these processes may keep one another waiting.
        coalesce_ms: longest time that tokens wait for the next step, so that steps leave in one message; see
            `CoalescePolicy`. 0: none do.
        step_timeout_s: how long the step loop may stand still before the engine ends; 0: for ever.
        log_stats_interval_s: pause between two lines of throughput while there is work; 0: none.
    """

    model: str
    served_model_name: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DtypeName = "auto"
    max_model_len: int | None = None
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 50052
    uds: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    insecure_bind: bool = False
    exit_on_stdin_close: bool = False
    shutdown_timeout_s: float = 30.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: SchedulingPolicyName = "fcfs"
    max_num_queued_reqs: int = 4096
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    max_logprobs: int = 20
    block_size: int = 16
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    device: DeviceName = "auto"
    tensor_parallel_size: int = 1
    rank_timeout_s: float = 300.0
    threads: int | None = None
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtypeName = "auto"
    batch_invariant: bool = False
    coalesce_ms: float = 25.0
    step_log: Path | None = None
    integrity_check_interval_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    step_timeout_s: float = 300.0
    log_stats_interval_s: float = 10.0

    @property
    def address(self) -> str:
        """Where to listen, as gRPC spells it."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def model_name(self) -> str:
        """The name frontends see."""
        if self.served_model_name is not None:
            return self.served_model_name
        path = Path(self.model)
        if path == MODEL_DIR:
            return DEMO_MODEL_NAME
        return path.resolve().name if os.path.isdir(path) else self.model  # noqa: PTH112 - False where it may not look

    def max_steps_in_flight(self, device: str) -> int:
        """2 with asynchronous scheduling, else 1. By default 2 on "cuda" and 1 on "cpu": a CPU that computes a step has
        nothing to plan the next one with meanwhile.
        """
        is_async = self.async_scheduling if self.async_scheduling is not None else device != "cpu"
        return 2 if is_async else 1

    def step_limits(self, device: str) -> StepLimits:
        """Limits of a step on this device: 64 requests and 512 tokens by default on "cpu", 256 and 2048 on "cuda".

        Raises: ConfigError: one step could not hold one token of every request.
        """
        default = DEFAULT_STEP_LIMITS[device]
        max_num_seqs = self.max_num_seqs or default.max_num_seqs
        max_num_batched_tokens = self.max_num_batched_tokens or max(default.max_num_batched_tokens, max_num_seqs)
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {max_num_batched_tokens} is less than --max-num-seqs {max_num_seqs}: "
                f"a step needs one token for every running request; raise the first or lower the second"
            )
        return StepLimits(max_num_seqs, max_num_batched_tokens)
