"""vLLM: `vllm.grpc.engine.VllmEngine`, which `python -m vllm.entrypoints.grpc_server` serves."""

from collections.abc import Callable
from typing import Any

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import ConfigError
from frontend.routing.foreign.continuation import Continuation
from frontend.routing.foreign.dialect import (
    DEFAULT_BLOCK_TOKENS,
    MAX_LOGPROBS,
    Dialect,
    DialectError,
    EngineFacts,
    EngineLoads,
    Part,
    PartEnd,
    logprob_batch,
    prompt_logprob_batch,
)
from frontend.routing.foreign.grammar import portable

MAX_SEED = 2**31 - 1


class VllmDialect(Dialect):
    """Maps VllmEngine."""

    kind = "vLLM"
    service = "vllm.grpc.engine.VllmEngine"

    def _generated_code(self) -> tuple[Any, Callable[[grpc.aio.Channel], Any]]:
        from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

        return vllm_engine_pb2, vllm_engine_pb2_grpc.VllmEngineStub

    async def facts(self, timeout_s: float) -> EngineFacts:
        """See Dialect."""
        model, server = await self._describe(timeout_s)
        if not model.is_generation:
            raise ConfigError(f"the engine's model {model.model_path} does not generate text")
        return EngineFacts(
            model=model.served_model_name or model.model_path,
            max_model_len=model.max_context_length,
            vocab_size=model.vocab_size,
            end_token_ids=tuple(model.eos_token_ids),
            block_size=max(server.block_size, 0) or DEFAULT_BLOCK_TOKENS,
            max_num_seqs=max(server.max_num_seqs, 0),
        )

    async def heartbeat(self, timeout_s: float) -> EngineLoads | None:
        """See Dialect."""
        if problem := await self.check_health(timeout_s):
            raise DialectError(problem)
        response = await self._stub.GetLoads(self._pb.GetLoadsRequest(), timeout=timeout_s)
        return sum_loads(response)

    def request(self, request_id: str, submission: pb.Submission, rest: Continuation) -> Any:
        """See Dialect."""
        self._check_common(submission)
        sampling, stops = submission.sampling, submission.stops
        params = self._pb.SamplingParams(
            **self._common_sampling(sampling),
            top_k=sampling.top_k,
            max_tokens=rest.max_tokens,
            min_tokens=rest.min_tokens,
            stop_token_ids=stops.stop_token_ids,
            ignore_eos=stops.ignore_end_token,
            n=1,
            seed=rest.seed & MAX_SEED,
            logit_bias=rest.logit_bias,
        )
        if submission.HasField("top_logprobs"):
            params.logprobs = one_more(submission.top_logprobs)
        if submission.HasField("prompt_logprobs"):
            params.prompt_logprobs = one_more(submission.prompt_logprobs)
        if submission.grammar:
            grammar = portable(submission.grammar)
            if grammar.json_schema:
                params.json_schema = grammar.json_schema
            else:
                params.grammar = grammar.lark
            params.grammar_from_first_token = True
        return self._pb.GenerateRequest(
            request_id=request_id,
            tokenized=self._pb.TokenizedInput(input_ids=rest.prompt_ids),
            sampling_params=params,
            stream=True,
        )

    def part(self, response: Any, num_top: int, num_prompt_top: int) -> Part | None:
        """See Dialect."""
        return columns_part(response, num_top, num_prompt_top)

    async def abort(self, request_id: str, timeout_s: float) -> None:
        """See Dialect."""
        await self._stub.Abort(self._pb.AbortRequest(request_ids=[request_id]), timeout=timeout_s)


def one_more(num_top: int) -> int:
    """Returns how many alternatives to ask for: the drawn token is counted among them, and may displace the last."""
    return min(num_top + 1, MAX_LOGPROBS) if num_top else 0


def sum_loads(response: Any) -> EngineLoads:
    """Adds up the ranks of GetLoadsResponse, which is alike in vLLM and SGLang."""
    total = EngineLoads(version=response.version)
    for load in response.loads:
        total.num_running += max(load.num_running_reqs, 0)
        total.num_waiting += max(load.num_waiting_reqs, 0)
        total.num_waiting_tokens += max(load.num_waiting_uncached_tokens, 0)
        capacity = max(load.max_total_num_tokens, 0)
        total.capacity_tokens += capacity
        total.num_used_tokens += max(load.num_used_tokens, min(max(load.token_usage, 0.0), 1.0) * capacity)
    return total


def columns_part(response: Any, num_top: int, num_prompt_top: int) -> Part | None:
    """Converts GenerateResponse, which is alike in vLLM and SGLang; see `Dialect.part`."""
    match response.WhichOneof("response"):
        case "chunk":
            chunk = response.chunk
            return Part(
                token_ids=list(chunk.token_ids),
                index=chunk.index,
                num_prompt_tokens=chunk.prompt_tokens,
                num_cached_tokens=chunk.cached_tokens,
                logprobs=logprob_batch(chunk.token_ids, chunk.output_logprobs, num_top),
                prompt_logprobs=prompt_logprob_batch(chunk.input_logprobs, num_prompt_top),
            )
        case "complete":
            complete = response.complete
            matched = complete.matched_token_id if complete.WhichOneof("matched_stop") == "matched_token_id" else None
            return Part(
                index=complete.index,
                num_prompt_tokens=complete.prompt_tokens,
                end=PartEnd(complete.finish_reason, matched, list(complete.output_ids)),
            )
    return None
