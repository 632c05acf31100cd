"""Environment variables that look like ours and that no program reads, because they are misspelt or outdated.

Engine and frontend often share one environment and do not know each other's flags, so both programs' names are listed.
"""

import difflib
import logging
import os
from collections.abc import Mapping

_PREFIX = "CHAIRLIFT_"

_OF_FLAGS = """
    ADMIN_API_KEY ADMIN_API_KEY_FILE ALLOWED_ORIGINS ALLOW_RUNTIME_LORA_UPDATING ALL_REDUCE API API_KEY API_KEY_FILE
    ASYNC_SCHEDULING ATTENTION_BACKEND BATCH_INVARIANT BEST_EFFORT_SHARE BLOCK_SIZE CHAT_TEMPLATE COALESCE COALESCE_MS
    DEFAULT_CHAT_TEMPLATE_KWARGS DEFAULT_TIMEOUT DEVICE DTYPE ENABLE_LORA ENABLE_PREFIX_CACHING ENFORCE_EAGER ENGINE
    ENGINE_HOST ENGINE_INSECURE_BIND ENGINE_PORT ENGINE_TLS_CA ENGINE_TLS_CERT ENGINE_TLS_CLIENT_CA
    ENGINE_TLS_CLIENT_CERT ENGINE_TLS_CLIENT_KEY ENGINE_TLS_KEY EXIT_ON_STDIN_CLOSE FAILOVER_TIMEOUT
    GPU_MEMORY_UTILIZATION GRAMMAR_MEMORY_BYTES GRAMMAR_TIMEOUT HEARTBEAT_TIMEOUT HOST HTTP HTTP_HOST HTTP_PORT
    INSECURE_BIND INTEGRITY_CHECK_INTERVAL KERNELS KERNEL_CHECK KV_CACHE_DTYPE KV_CACHE_MEMORY_BYTES LOAD_FORMAT
    LOG_FORMAT LOG_LEVEL LOG_PROMPTS LOG_REQUESTS LOG_STATS_INTERVAL LORA LORA_DIR MASTER_ADDR MAX_CONNECTION_AGE
    MAX_LOGPROBS MAX_LORAS MAX_LORA_RANK MAX_MODEL_LEN MAX_MOVES MAX_NUM_BATCHED_TOKENS MAX_NUM_QUEUED_REQS
    MAX_NUM_SEQS MAX_QUEUED_REQUESTS MAX_QUEUED_TOKENS MAX_STEP_TIME METRICS_PREFIX MODEL MODEL_IMPL NICE NNODES
    NODE_RANK NUM_GPU_BLOCKS_OVERRIDE OTLP_TRACES_ENDPOINT PACKED_CACHE PACKED_CACHE_BYTES PIPELINE_PARALLEL_SIZE PORT
    QUANTIZATION RANK_TIMEOUT REASONING_PARSER REFLECTION RETRY_HORIZON RETRY_TICKET_KEY_FILE REUSE_PORT
    SCHEDULING_POLICY SEED SERVED_MODEL_NAME SERVICE_CLASSES SHUTDOWN_TIMEOUT SMOKE_TEST SPECULATIVE_CONFIG
    STALL_TIMEOUT STEP_LOG STEP_TIMEOUT TENANT_WEIGHT TENSOR_PARALLEL_SIZE THREADS TLS_CERT TLS_CLIENT_CA TLS_KEY
    TOKENIZER TOKEN_WINDOW TOOL_CALL_PARSER TRUST_GATEWAY_HEADERS UDS UNKNOWN_PARAMETERS UVLOOP WORKERS
"""

_OF_CLIENTS_BENCHMARKS_AND_TESTS = """
    COMPILE_EVERYTHING FUZZ_CASE FUZZ_CASES MLX SMG TARGET TEST_SEED TLS_CA TRACES VLLM_PYTHON VLLM_ROUNDS WHEELS
"""

FLAG_VARIABLES = frozenset(_PREFIX + name for name in _OF_FLAGS.split())
"""Variables of the servers' flags."""

_KNOWN = FLAG_VARIABLES | {_PREFIX + name for name in _OF_CLIENTS_BENCHMARKS_AND_TESTS.split()}

_log = logging.getLogger(__name__)


def warn_of_unknown_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Logs a warning for each variable that has no effect, with the closest known one; never its value."""
    for name in unknown_variables(environ):
        _log.warning("environment variable %s has no effect: no program reads it%s", name, _meant(name))


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Returns the non-empty variables that begin with CHAIRLIFT_ and that no program reads, sorted.

    Kubernetes sets variables for every Service; those of one whose name begins with "chairlift" are left out.
    """
    services = [name.removesuffix("SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST")]
    links = tuple(service + end for service in services for end in ("SERVICE_", "PORT"))
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith(_PREFIX) and value and name not in _KNOWN and not name.startswith(links)
    )


def _meant(name: str) -> str:
    known = sorted(each.removeprefix(_PREFIX) for each in FLAG_VARIABLES)  # of equally close ones always the same
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1, 0.7)
    return f"; did you mean {_PREFIX}{near[0]}?" if near else ""
