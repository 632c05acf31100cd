"""What gateways ask about an engine: its model, its limits, its load and its tokenizer."""

import hashlib
import io
import json
import zipfile
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import common_pb2

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.interfaces import LoopSnapshot
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.parts import EngineParts

SERVER_TYPE = "vllm-grpc"  # the protocol's name for itself: gateways choose the runtime by it
_CHUNK_BYTES = 1 << 20
_RATE_WINDOW_S = 1.0
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # equal files make equal archives


def model_info(parts: EngineParts) -> Any:
    """Returns a GetModelInfoResponse."""
    info, checkpoint = parts.info, parts.checkpoint
    return vllm_pb.GetModelInfoResponse(
        model_path=checkpoint.path,
        tokenizer_path=checkpoint.path,
        served_model_name=info.model,
        is_generation=True,
        max_context_length=info.max_model_len,
        max_req_input_len=info.max_model_len - 1,
        vocab_size=info.vocab_size,
        model_type=checkpoint.model_type,
        architectures=checkpoint.architectures,
        eos_token_ids=info.end_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        pad_token_id=checkpoint.pad_token_id,
        default_sampling_params_json=_default_sampling(parts.tokenizer),
    )


def server_info(info: pb.EngineInfo, *, num_calls: int, received_at_s: float, uptime_s: float) -> Any:
    """Returns a GetServerInfoResponse.

    Args:
        info: of the engine.
        num_calls: open Generate calls.
        received_at_s: when the last one came, seconds since 1970; 0: there was none.
        uptime_s: age of the service.
    """
    return vllm_pb.GetServerInfoResponse(
        active_requests=num_calls,
        last_receive_timestamp=received_at_s,
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        constrained_decoding_start="first_token",
    )


class LoadMeter:
    """Converts the load of an engine; measures its tokens per second between two questions."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # monotonic seconds, tokens so far

    def loads(self, info: pb.EngineInfo, snapshot: LoopSnapshot, now_s: float) -> Any:
        """Returns a GetLoadsResponse.

        Args:
            info: of the engine.
            snapshot: its newest state.
            now_s: monotonic seconds.
        """
        stats = snapshot.stats
        num_used_blocks = stats.num_blocks - stats.num_free_blocks
        num_queried = stats.prefix_cache_queries_total
        load = vllm_pb.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=num_used_blocks * info.block_size,
            max_total_num_tokens=stats.num_blocks * info.block_size,
            token_usage=num_used_blocks / stats.num_blocks,
            gen_throughput=self._tokens_per_s(snapshot, now_s),
            cache_hit_rate=stats.prefix_cache_hits_total / num_queried if num_queried else 0.0,
            utilization=stats.num_running / info.max_num_seqs,
            max_running_requests=info.max_num_seqs,
            num_waiting_uncached_tokens=stats.num_waiting_prefill_tokens,
        )
        return vllm_pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=info.engine_version, dp_rank_count=1, loads=[load]
        )

    def _tokens_per_s(self, snapshot: LoopSnapshot, now_s: float) -> float:
        """Returns the rate since the last sample that is at least a second old; 0 if there is none."""
        num_tokens = snapshot.stats.num_generated_tokens_total
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= _RATE_WINDOW_S:
            self._samples.popleft()
        rate = 0.0
        if self._samples and now_s - self._samples[0][0] >= _RATE_WINDOW_S:
            since_s, before = self._samples[0]
            rate = (num_tokens - before) / (now_s - since_s)
        if not self._samples or now_s - self._samples[-1][0] >= _RATE_WINDOW_S:
            self._samples.append((now_s, num_tokens))
        return rate


def tokenizer_archive(tokenizer: TokenizerFiles) -> bytes:
    """Returns the files of a tokenizer as a ZIP archive."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in tokenizer.files:
            archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), content, zipfile.ZIP_DEFLATED)
    return data.getvalue()


def tokenizer_chunks(archive: bytes) -> Iterator[Any]:
    """Yields GetTokenizerChunks; the last one has the digest of the archive."""
    starts = range(0, len(archive), _CHUNK_BYTES)
    for start in starts:
        chunk = common_pb2.GetTokenizerChunk(data=archive[start : start + _CHUNK_BYTES])
        if start == starts[-1]:
            chunk.sha256 = hashlib.sha256(archive).hexdigest()
        yield chunk


def _default_sampling(tokenizer: TokenizerFiles) -> str:
    """Returns the sampling parameters of generation_config.json as JSON; empty without any."""
    config = json.loads(dict(tokenizer.files).get("generation_config.json", b"{}"))
    defaults = {name: config[name] for name in _SAMPLING_DEFAULTS if config.get(name) is not None}
    return json.dumps(defaults) if defaults else ""
