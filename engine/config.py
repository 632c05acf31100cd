"""The engine's configuration: its flags, and what follows from several of them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.service.flags import FlagError, FlagParser, add_flags, config_from
from engine.core.drafts import DraftLimits
from engine.demo import MODEL_DIR
from engine.errors import ConfigError
from engine.flags import DEFAULT_STEP_LIMITS, EngineFlags, OtherAttention, StepLimits
from engine.parallel.layout import RankLayout
from engine.speculative_config import parse_speculative_config

DEMO_MODEL_NAME = "chairlift-demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineFlags):
    """The engine's settings.

    Values made in code are not checked here; `parse_config` checks each one, and what depends on model or device is
    checked when the engine is built.
    """

    @property
    def address(self) -> str:
        """The address to listen on, in gRPC's form."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in requests, at least one; the first is also its name in responses."""
        return self.served_model_name or (self._default_model_name,)

    @property
    def model_name(self) -> str:
        """The model's name in responses, logs and metrics."""
        return self.model_names[0]

    @property
    def _default_model_name(self) -> str:
        path = Path(self.model)
        if path == MODEL_DIR:
            return DEMO_MODEL_NAME
        if os.path.isfile(path):  # noqa: PTH113 - False where it may not look
            return path.name.removesuffix(".gguf")
        return path.resolve().name if os.path.isdir(path) else self.model  # noqa: PTH112 - as above

    @property
    def weights_by_tenant(self) -> dict[str, float]:
        """The weights of `tenant_weight`; the last one of a tenant counts."""
        pairs = (setting.rpartition("=") for setting in self.tenant_weight)
        return {tenant: float(weight) for tenant, _, weight in pairs}

    @property
    def drafts(self) -> DraftLimits | None:
        """What --speculative-config says.

        Raises: ConfigError: names what is wrong with it.
        """
        return None if self.speculative_config is None else parse_speculative_config(self.speculative_config)

    def uses_torch_kernels(self, device: str) -> bool:
        """Whether the model's operations are plain PyTorch on "cpu" or "cuda".

        So are those of several ranks on a CPU: the fast ones compile a step to one native program, which cannot contain
        collectives.
        """
        return self.kernels == "torch" or (device == "cpu" and self.tensor_parallel_size > 1)

    @property
    def other_attention(self) -> OtherAttention | None:
        """The attention backend if it is not that of --kernels."""
        if self.attention_backend == "auto" or self.attention_backend == "triton":
            return None
        return self.attention_backend

    @property
    def records_graphs(self) -> bool:
        """Whether a GPU records steps as CUDA graphs."""
        return not self.enforce_eager and self.kernels != "torch" and self.other_attention is None

    @property
    def layout(self) -> RankLayout:
        """The ranks that share the model.

        Raises: ConfigError: the flags contradict each other.
        """
        num_stages, num_nodes = self.pipeline_parallel_size, self.nnodes
        if self.node_rank >= num_nodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} is not below --nnodes {num_nodes}: machines are counted from 0"
            )
        if num_nodes > 1 and self.master_addr is None:
            raise ConfigError(f"--nnodes {num_nodes} needs --master-addr: HOST:PORT of the machine of rank 0")
        if num_nodes == 1 and self.master_addr is not None:
            raise ConfigError(f"--master-addr {self.master_addr} needs --nnodes: the number of machines")
        if num_stages % num_nodes:
            raise ConfigError(
                f"--pipeline-parallel-size {num_stages} is not a multiple of --nnodes {num_nodes}: each machine has as "
                "many stages"
            )
        return RankLayout(self.tensor_parallel_size, num_stages, num_nodes)

    def max_tokens_in_flight(self, device: str) -> int:
        """Most tokens of all steps in flight."""
        return self.step_limits(device).max_num_batched_tokens * self.max_steps_in_flight(device)

    def max_state_snapshots(self, device: str) -> int:
        """Most copies of states besides keys and values that are kept for prefixes: a few for each running request."""
        return 4 * self.step_limits(device).max_num_seqs if self.enable_prefix_caching else 0

    def max_steps_in_flight(self, device: str) -> int:
        """2 with asynchronous scheduling, else 1. The default is 2 on "cuda" and 1 on "cpu", where planning would take
        time from the step that runs. In pipeline stages one for each, and on "cuda" one more. With drafts 1: the next
        one follows the last token.
        """
        if self.speculative_config is not None:
            return 1
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size + (device != "cpu")
        is_async = self.async_scheduling if self.async_scheduling is not None else device != "cpu"
        return 2 if is_async else 1

    def step_limits(self, device: str) -> StepLimits:
        """Returns the limits of a step on this device: by default 64 requests and 512 tokens on "cpu", 256 and 2048 on
        "cuda".

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


def parse_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """Makes the configuration of flags and environment.

    Args:
        argv: the command line without the program's name.
        environ: environment variables.
    Returns: a configuration whose single values are in range.
    Raises: SystemExit: status 2 after one line on stderr that says what to change; status 0 after --help.
    """
    parser = FlagParser(
        "chairlift-engine",
        description="Runs a model's engine: schedules requests and computes their tokens for chairlift-frontend, over "
        "gRPC. Each flag is also the environment variable in brackets; the command line overrides it. Counts accept "
        "the suffixes k, M and G.",
    )
    add_flags(parser, EngineConfig)
    try:
        config = config_from(parser.parse_args(argv), EngineConfig, environ)
        _check_names(config.served_model_name)
        _ = config.drafts
    except (FlagError, ConfigError) as error:
        parser.error(str(error))
    return config


def _check_names(names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            raise FlagError(f"--served-model-name has {name!r} twice: each name stands for the model once")
