"""The engine's flags and environment variables, as one frozen dataclass; `engine.config` has what follows from them.

Names and defaults are vLLM's where the thing is the same. Where the frontend has a flag of the same name, the variable
names the engine: `--port` is CHAIRLIFT_ENGINE_PORT.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from chairlift.service.flag_kinds import choice, integer, number, optional, path, repeated, switch, text
from chairlift.service.flags import flag
from chairlift.service.logs import LOG_FORMATS, LOG_LEVELS
from engine.core.config import SchedulingPolicyName
from engine.demo import MODEL_DIR
from engine.model.implementation import ModelImpl
from engine.model.shapes import shape_names

BLOCK_SIZES = (16, 32, 64, 128)

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "fp8"]
KVCacheDtypeName = Literal["auto", "bfloat16", "int8", "fp8"]
KernelsName = Literal["auto", "triton", "torch"]
OtherAttention = Literal["flashinfer", "flash-attn", "torch"]
AttentionBackend = Literal["auto", "triton", OtherAttention]
KernelCheck = Literal["off", "warn", "fail"]
AllReduce = Literal["auto", "nccl"]
ApiName = Literal["chairlift", "vllm"]
LoadFormat = Literal["auto", "safetensors", "dummy"]


MAX_ADAPTER_NAME_CHARS = 256
"""Longest name of an adapter."""


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return 0 < len(name.strip()) == len(name) <= MAX_ADAPTER_NAME_CHARS and name.isprintable()


def _is_lora(setting: str) -> bool:
    name, _, path = setting.partition("=")
    return bool(path) and is_adapter_name(name)


def _is_weight(setting: str) -> bool:
    tenant, _, weight = setting.rpartition("=")
    try:
        return bool(tenant) and 0.0 < float(weight) < float("inf")
    except ValueError:
        return False


def _is_endpoint(setting: str) -> bool:
    host, _, port = setting.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536


class StepLimits(NamedTuple):
    """Maximum number of requests and of tokens in one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


# A CPU computes 1/100 of a GPU's tokens per second: its steps are smaller, to keep inter-token latency low.
DEFAULT_STEP_LIMITS = {"cpu": StepLimits(64, 512), "cuda": StepLimits(256, 2048)}

_CPU, _CUDA = DEFAULT_STEP_LIMITS["cpu"], DEFAULT_STEP_LIMITS["cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The engine's settings, each with its flag; None means that the default depends on the model or the device."""

    model: str = flag(
        str(MODEL_DIR), text(), "model folder, GGUF file or Hugging Face hub id",
        group="model", default_text="the bundled demo model",
    )  # fmt: skip
    served_model_name: tuple[str, ...] = flag(
        (), repeated(text(), takes_several=True),
        "names of the model in requests, one or several; responses and metrics have the first one",
        default_text="the name of the folder or file, or the hub id",
    )  # fmt: skip
    load_format: LoadFormat = flag(
        "auto", choice(get_args(LoadFormat)),
        "dummy: random weights, to benchmark a shape without its checkpoint; --model may then be one of "
        f"{', '.join(shape_names())}",
    )  # fmt: skip
    lora: tuple[str, ...] = flag(
        (), repeated(text("NAME=PATH", _is_lora, metavar="NAME=PATH")),
        "a LoRA adapter of the model, in PEFT's format: requests that name NAME as their model get its answers; repeat "
        "it for several", default_text="none",
    )  # fmt: skip
    enable_lora: bool = flag(
        False, switch(),
        "reserve memory for --max-loras adapters of up to --max-lora-rank; with --lora-dir they can then be "
        "loaded and unloaded while the engine serves",
    )  # fmt: skip
    max_loras: int | None = flag(
        None, integer(1, 4096),
        "with --enable-lora: number of adapters that can be loaded at a time, those of --lora included. One that is "
        "unloaded or replaced counts until its last request has ended",
        default_text="4, or one more than --lora has",
    )  # fmt: skip
    max_lora_rank: int = flag(
        16, integer(1, 512), "with --enable-lora: largest rank of an adapter; memory is reserved for it in each layer"
    )
    lora_dir: tuple[str, ...] = flag(
        (), repeated(text(metavar="DIR")),
        "with --enable-lora: folder from which a frontend may load adapters at run time; nothing outside of "
        "it is read, links included. Repeat it for several", default_text="none: adapters are those of --lora",
    )  # fmt: skip
    model_impl: ModelImpl = flag(
        "auto", choice(get_args(ModelImpl)),
        "what computes the model. chairlift: its own decoder; transformers: the library, over Chairlift's KV cache and "
        "linear layers; auto: chairlift for the architectures that it has, transformers for others",
    )  # fmt: skip
    dtype: DtypeName = flag(
        "auto", choice(get_args(DtypeName)),
        "dtype of weights and, on a GPU, of activations. A CPU stores weights in it and computes in float32, but with "
        "bfloat16 multiplies linear layers in bfloat16, if it has AVX512-BF16. auto: the checkpoint's, which on a CPU "
        "rounds nothing",
    )  # fmt: skip
    max_model_len: int | None = flag(
        None, optional(integer(2, 2**31 - 1), "auto", "-1"),
        "maximum tokens of prompt and output; auto or -1: the model's limit, reduced to what the KV cache can hold. "
        "Lower it to save cache memory per request", default_text="auto",
    )  # fmt: skip
    seed: int = flag(0, integer(0, 2**63 - 1), "seed of dummy weights; requests carry their own seeds")

    api: ApiName = flag(
        "chairlift", choice(get_args(ApiName)),
        "gRPC APIs of the port. vllm: that of vLLM's engine too, for gateways such as SMG; needs the extra "
        "chairlift[engines]",
        group="address and lifetime",
    )  # fmt: skip
    host: str = flag(
        "127.0.0.1", text(), "address to listen on; an address other than loopback needs mutual TLS",
        variable="CHAIRLIFT_ENGINE_HOST",
    )  # fmt: skip
    port: int = flag(
        50052, integer(0, 65535), "port to listen on; 0 selects a free one",
        variable="CHAIRLIFT_ENGINE_PORT",
    )  # fmt: skip
    uds: Path | None = flag(None, path(), "listen on this unix socket instead of --host and --port")
    tls_cert: Path | None = flag(
        None, path(), "certificate chain of this engine (PEM); the port then accepts TLS only",
        variable="CHAIRLIFT_ENGINE_TLS_CERT",
    )  # fmt: skip
    tls_key: Path | None = flag(
        None, path(), "private key of --tls-cert (PEM, unencrypted)",
        variable="CHAIRLIFT_ENGINE_TLS_KEY",
    )  # fmt: skip
    tls_client_ca: Path | None = flag(
        None, path(), "CA certificates (PEM) used to verify frontends' certificates (mutual TLS)",
        variable="CHAIRLIFT_ENGINE_TLS_CLIENT_CA",
    )  # fmt: skip
    insecure_bind: bool = flag(
        False, switch(),
        "allow a non-loopback --host without mutual TLS; only on a network that is isolated otherwise",
        variable="CHAIRLIFT_ENGINE_INSECURE_BIND",
    )  # fmt: skip
    exit_on_stdin_close: bool = flag(
        False, switch(),
        "exit when standard input closes, so that the engine ends with the parent process that holds it",
    )  # fmt: skip
    shutdown_timeout_s: float = flag(
        30.0, number(0, 86400), "seconds for running requests to finish after SIGTERM or SIGINT"
    )

    max_num_seqs: int | None = flag(
        None, integer(1, 65536),
        "maximum number of running requests (slots). More slots raise throughput, fewer make each answer faster",
        group="scheduling", default_text=f"{_CUDA.max_num_seqs}; {_CPU.max_num_seqs} on a CPU",
    )  # fmt: skip
    max_num_batched_tokens: int | None = flag(
        None, integer(1, 2**20),
        "token budget of one step, at least --max-num-seqs. Lower it to bound inter-token latency while long prompts "
        "are computed", default_text=f"{_CUDA.max_num_batched_tokens}; {_CPU.max_num_batched_tokens} on a CPU",
    )  # fmt: skip
    scheduling_policy: SchedulingPolicyName = flag(
        "fcfs", choice(get_args(SchedulingPolicyName)),
        "order of admission; fcfs: first come, first served; priority: by the requests' priority and age; static: "
        "whole batches, a baseline for benchmarks; slo: by the requests' latency targets, from a model of step times "
        "that is measured at the start",
    )  # fmt: skip
    best_effort_share: float = flag(
        0.1, number(0, 0.9),
        "with --scheduling-policy slo: share of the prompt tokens and of the slots for requests without targets while "
        "others wait. A larger one makes them start sooner and fewer requests meet their targets",
    )  # fmt: skip
    max_step_time_s: float = flag(
        0.1, number(0.001, 60),
        "with --scheduling-policy slo: longest step in seconds while no running request has an inter-token target. "
        "Arrivals wait for the running step: lower it for short first-token targets, raise it for throughput",
    )  # fmt: skip
    tenant_weight: tuple[str, ...] = flag(
        (), repeated(text("TENANT=WEIGHT with a weight above 0", _is_weight, metavar="TENANT=WEIGHT")),
        "with --scheduling-policy slo: share of a tenant relative to the others, which have 1; repeat it for several",
        default_text="none",
    )  # fmt: skip
    max_num_queued_reqs: int = flag(
        4096, integer(1, 2**20), "maximum number of queued requests; further ones are rejected"
    )
    async_scheduling: bool | None = flag(
        None, switch(), "plan and launch a step while the previous one runs; the output is the same",
        default_text="on with a GPU, off on a CPU",
    )  # fmt: skip
    speculative_config: str | None = flag(
        None, text(metavar="JSON"),
        "draft tokens from what a request has said before and verify them in one step, with the same answers: "
        '\'{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}\'. Answers '
        "that copy their prompt or repeat themselves come in fewer steps", default_text="off",
    )  # fmt: skip
    coalesce_ms: float = flag(
        25.0, number(0, 1000),
        "maximum delay in milliseconds to merge several steps into one message; with fewer than 8 streams only steps "
        "shorter than 0.2 of it. First tokens and ends are never delayed. 0 disables merging: more even inter-token "
        "latency, more CPU per token",
    )  # fmt: skip
    enforce_eager: bool = flag(
        False, switch(), "disable CUDA graphs: less memory and a faster start, slower steps of up to 512 tokens"
    )
    max_logprobs: int = flag(
        20, integer(0, 1024), "maximum number of alternatives per token that a request may ask for"
    )

    quantization: Quantization | None = flag(
        None, choice(get_args(Quantization)),
        "quantize weights on load, with one scale per output channel, and activations, with one per token: int8 on a "
        "CPU, fp8 on a GPU",
        group="precision", default_text="not quantized",
    )  # fmt: skip
    kv_cache_dtype: KVCacheDtypeName = flag(
        "auto", choice(get_args(KVCacheDtypeName)),
        "dtype of the KV cache; auto: that of activations, and bfloat16 on a CPU with --dtype bfloat16. bfloat16 (CPU) "
        "holds twice the tokens of float32; int8 (CPU) and fp8 (GPU) hold more, with one scale per token and head",
    )  # fmt: skip
    batch_invariant: bool = flag(
        False, switch(),
        "compute bit-identical logits of a request in any batch, or exit at the start where this is not supported. One "
        "CPU rank always does; a GPU then uses slower kernels",
    )  # fmt: skip

    block_size: int = flag(
        16,
        integer(1, 128, only=BLOCK_SIZES),
        f"tokens per KV cache block: {', '.join(map(str, BLOCK_SIZES))}",
        group="KV cache",
    )
    enable_prefix_caching: bool = flag(
        True, switch(), "reuse the KV cache of equal prefixes; disable it if prompts share nothing"
    )
    gpu_memory_utilization: float = flag(
        0.92, number(0.01, 1),
        "fraction of the GPU's memory for weights, activations and KV cache; lower it if other processes use the GPU",
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = flag(
        None, integer(1, 2**50), "size of the KV cache in bytes, such as 4G; overrides --gpu-memory-utilization",
        default_text="what --gpu-memory-utilization leaves; on a CPU half of the free memory, at most 4 GiB, and no "
        "more than --max-num-seqs requests can fill",
    )  # fmt: skip
    num_gpu_blocks_override: int | None = flag(
        None, integer(1, 2**31 - 1), "size of the KV cache in blocks, also on a CPU; overrides all sizes in bytes",
    )  # fmt: skip

    packed_cache: Path | None = flag(
        None, path(),
        "folder that keeps the weights of a CPU as they are packed in memory, so that the next start with this model "
        "maps them and engines share them; takes as much disk as the weights take memory", default_text="off",
    )  # fmt: skip
    packed_cache_bytes: int = flag(
        64 * 2**30, integer(1, 2**50),
        "size of --packed-cache; beyond it the models used least recently are removed", default_text="64 GiB",
    )  # fmt: skip

    device: DeviceName = flag(
        "auto", choice(get_args(DeviceName)), "device to run on; auto: a GPU if there is one", group="machine"
    )
    kernels: KernelsName = flag(
        "auto", choice(get_args(KernelsName)),
        "implementation of the model's operations. auto: triton on a GPU, numba on a CPU; torch: plain PyTorch on "
        "either, slow and without CUDA graphs, to work around a faulty kernel",
    )  # fmt: skip
    attention_backend: AttentionBackend = flag(
        "auto", choice(get_args(AttentionBackend)),
        "implementation of attention on a GPU; auto: that of --kernels. flashinfer and flash-attn are libraries to be "
        "installed, torch is slow; all three run without CUDA graphs",
    )  # fmt: skip
    kernel_check: KernelCheck = flag(
        "fail", choice(get_args(KernelCheck)),
        "what to do if a kernel's result differs from plain PyTorch's at the start; the check takes about a second. "
        "fail: exit with a line that names the kernel; warn: log it and serve; off: do not check",
    )  # fmt: skip
    tensor_parallel_size: int = flag(
        1, integer(1, 1024),
        "number of processes that share each layer of the model, one per GPU; on a CPU for tests only, because it is "
        "slow",
        aliases=["-tp"],
    )  # fmt: skip
    pipeline_parallel_size: int = flag(
        1, integer(1, 1024),
        "number of stages that the layers are divided among, each --tensor-parallel-size processes; as many steps run "
        "at once, of other requests each",
        aliases=["-pp"],
    )  # fmt: skip
    nnodes: int = flag(
        1, integer(1, 1024),
        "number of machines that share the model, each with as many stages; start the engine on each of them, with the "
        "same flags but --node-rank",
    )  # fmt: skip
    node_rank: int = flag(
        0, integer(0, 1023), "with --nnodes: which machine this is, from 0. Frontends connect to that of rank 0"
    )
    master_addr: str | None = flag(
        None, text("HOST:PORT", _is_endpoint, metavar="HOST:PORT"),
        "with --nnodes: where the machine of rank 0 waits for the others, reachable from them. What they then exchange "
        "is neither encrypted nor authenticated: use an isolated network", default_text="none",
    )  # fmt: skip
    all_reduce: AllReduce = flag(
        "auto", choice(get_args(AllReduce)),
        "how GPUs add up their parts of a layer. auto: small tensors in torch's symmetric memory if all GPUs map each "
        "other's, others by NCCL; nccl: always NCCL",
    )  # fmt: skip
    rank_timeout_s: float = flag(
        300.0, number(1, 86400),
        "seconds that these processes wait for each other before the engine exits; must exceed the longest step",
    )  # fmt: skip
    threads: int | None = flag(
        None, integer(1, 1024),
        "CPU threads of each process; one less than the cores leaves a core to frontend and clients",
        default_text="one per core, not per hyperthread, divided among the processes",
    )  # fmt: skip
    step_timeout_s: float = flag(
        300.0, number(0, 86400),
        "seconds without progress of the step loop after which the engine exits; must exceed the longest step. 0 "
        "disables",
    )  # fmt: skip
    # One check takes 8 ms of a core (AMD EPYC) with 256 running requests and 27,000 blocks, 17 ms with 100,000: 0.03 %
    # and 0.06 % of 30 s.
    integrity_check_interval_s: float = flag(
        30.0, number(0, 86400),
        "seconds between KV cache consistency checks of a few milliseconds; the engine exits if one fails. 0 disables",
    )  # fmt: skip

    step_log: Path | None = flag(None, path(), "file to which one JSON line per step is appended", group="logs")
    log_level: str = flag("info", choice(LOG_LEVELS), "lowest level that is logged to stderr")
    log_format: str = flag(
        "text", choice(LOG_FORMATS), "text for people; json: one object per line, for log collectors"
    )
    log_stats_interval_s: float = flag(
        10.0, number(0, 86400), "seconds between throughput lines while there is work; 0 disables them"
    )
