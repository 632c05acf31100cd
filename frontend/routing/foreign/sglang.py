"""SGLang: `sglang.grpc.scheduler.SglangScheduler`, whose messages are close to vLLM's."""

from collections.abc import Callable
from typing import Any

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import ConfigError
from frontend.routing.foreign.continuation import Continuation
from frontend.routing.foreign.dialect import Dialect, EngineFacts, EngineLoads, Part
from frontend.routing.foreign.grammar import portable
from frontend.routing.foreign.vllm import columns_part, sum_loads

_UNNAMED_WEIGHTS = "default"


class SglangDialect(Dialect):
    """Maps SglangScheduler."""

    kind = "SGLang"
    service = "sglang.grpc.scheduler.SglangScheduler"

    def _generated_code(self) -> tuple[Any, Callable[[grpc.aio.Channel], Any]]:
        from smg_grpc_proto.generated import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

        return sglang_scheduler_pb2, sglang_scheduler_pb2_grpc.SglangSchedulerStub

    async def facts(self, timeout_s: float) -> EngineFacts:
        """See Dialect."""
        model, server = await self._describe(timeout_s)
        if not model.is_generation:
            raise ConfigError(f"the engine's model {model.model_path} does not generate text")
        return EngineFacts(
            model=model.served_model_name or model.model_path,
            revision="" if model.weight_version == _UNNAMED_WEIGHTS else model.weight_version,
            version=server.sglang_version,
            max_model_len=max(model.max_context_length, 0),
            vocab_size=max(model.vocab_size, 0),
            end_token_ids=tuple(model.eos_token_ids),
        )

    async def heartbeat(self, timeout_s: float) -> EngineLoads | None:
        """See Dialect. For a health check the engine would generate a token."""
        return sum_loads(await self._stub.GetLoads(self._pb.GetLoadsRequest(), timeout=timeout_s))

    def request(self, request_id: str, submission: pb.Submission, rest: Continuation) -> Any:
        """See Dialect. The proto has no seed."""
        self._check_common(submission)
        sampling, stops = submission.sampling, submission.stops
        params = self._pb.SamplingParams(
            **self._common_sampling(sampling),
            top_k=min(sampling.top_k, 2**31 - 1) or -1,
            max_new_tokens=rest.max_tokens,
            min_new_tokens=rest.min_tokens,
            stop_token_ids=stops.stop_token_ids,
            ignore_eos=stops.ignore_end_token,
            n=1,
            logit_bias={str(token_id): value for token_id, value in rest.logit_bias.items()},
        )
        if submission.grammar:
            grammar = portable(submission.grammar)
            if grammar.json_schema:
                params.json_schema = grammar.json_schema
            else:
                params.ebnf_grammar = grammar.lark
        wants_prompt = submission.HasField("prompt_logprobs")
        if wants_prompt and submission.prompt_logprobs != submission.top_logprobs:
            raise self._refuse("prompt_logprobs other than top_logprobs")
        return self._pb.GenerateRequest(
            request_id=request_id,
            tokenized=self._pb.TokenizedInput(input_ids=rest.prompt_ids),
            sampling_params=params,
            return_logprob=wants_prompt or submission.HasField("top_logprobs"),
            logprob_start_len=0 if wants_prompt else -1,
            top_logprobs_num=submission.top_logprobs,
            stream=True,
        )

    def part(self, response: Any, num_top: int, num_prompt_top: int) -> Part | None:
        """See Dialect."""
        return columns_part(response, num_top, num_prompt_top)

    async def abort(self, request_id: str, timeout_s: float) -> None:
        """See Dialect."""
        await self._stub.Abort(self._pb.AbortRequest(request_id=request_id, reason="cancelled"), timeout=timeout_s)
