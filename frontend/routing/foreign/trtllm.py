"""TensorRT-LLM: `trtllm.TrtllmService`. It reports neither load nor end tokens, and its health is a word."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.routing.foreign.continuation import Continuation
from frontend.routing.foreign.dialect import (
    Dialect,
    DialectError,
    EngineFacts,
    EngineLoads,
    Part,
    PartEnd,
    with_alternatives,
)
from frontend.routing.foreign.grammar import portable
from frontend.routing.logprobs import LogprobBatch

_HEALTHY = "OK"


class TrtllmDialect(Dialect):
    """Maps TrtllmService."""

    kind = "TensorRT-LLM"
    service = "trtllm.TrtllmService"

    def _generated_code(self) -> tuple[Any, Callable[[grpc.aio.Channel], Any]]:
        from smg_grpc_proto.generated import trtllm_service_pb2, trtllm_service_pb2_grpc

        return trtllm_service_pb2, trtllm_service_pb2_grpc.TrtllmServiceStub

    async def facts(self, timeout_s: float) -> EngineFacts:
        """See Dialect."""
        model, server = await self._describe(timeout_s)
        return EngineFacts(
            model=model.model_id,
            version=server.version,
            max_model_len=max(model.max_seq_len, 0),
            vocab_size=max(model.vocab_size, 0),
            max_num_seqs=max(model.max_batch_size, 0),
        )

    async def check_health(self, timeout_s: float) -> str:
        """See Dialect."""
        health = await self._stub.HealthCheck(self._pb.HealthCheckRequest(), timeout=timeout_s)
        return "" if health.status == _HEALTHY else health.status or "it is not healthy"

    async def heartbeat(self, timeout_s: float) -> EngineLoads | None:
        """See Dialect."""
        if problem := await self.check_health(timeout_s):
            raise DialectError(problem)
        return None

    def request(self, request_id: str, submission: pb.Submission, rest: Continuation) -> Any:
        """See Dialect. The proto has no biases: a continued answer's penalties begin anew."""
        self._check_common(submission)
        sampling, stops = submission.sampling, submission.stops
        if sampling.bias_ids:
            raise self._refuse("logit_bias")
        if submission.HasField("prompt_logprobs"):
            raise self._refuse("prompt_logprobs")
        message = self._pb.GenerateRequest(
            request_id=request_id,
            tokenized=self._pb.TokenizedInput(input_token_ids=rest.prompt_ids),
            sampling_config=self._pb.SamplingConfig(
                beam_width=1,
                num_return_sequences=1,
                **self._common_sampling(sampling),
                top_k=min(sampling.top_k, 2**31 - 1),
                min_tokens=rest.min_tokens,
                seed=rest.seed,
            ),
            output_config=self._pb.OutputConfig(exclude_input_from_output=True),
            max_tokens=rest.max_tokens,
            streaming=True,
            stop_token_ids=stops.stop_token_ids,
            ignore_eos=stops.ignore_end_token,
            include_stop_token_in_output=True,
        )
        if submission.HasField("top_logprobs"):
            message.output_config.logprobs = max(submission.top_logprobs, 1)  # 0 is none
        if submission.grammar:
            grammar, guides = portable(submission.grammar), self._pb.GuidedDecodingParams
            kind = guides.GUIDE_TYPE_JSON_SCHEMA if grammar.json_schema else guides.GUIDE_TYPE_EBNF_GRAMMAR
            message.guided_decoding.CopyFrom(guides(guide_type=kind, guide=grammar.json_schema or grammar.lark))
        return message

    def part(self, response: Any, num_top: int, num_prompt_top: int) -> Part | None:  # noqa: ARG002 - see `request`
        """See Dialect."""
        match response.WhichOneof("response"):
            case "chunk":
                chunk = response.chunk
                return Part(
                    token_ids=list(chunk.token_ids),
                    index=chunk.sequence_index,
                    num_prompt_tokens=chunk.prompt_tokens,
                    num_cached_tokens=chunk.cached_tokens,
                    logprobs=_logprobs(chunk.token_ids, chunk.logprobs, num_top),
                )
            case "complete":
                complete = response.complete
                has_match = complete.WhichOneof("matched_stop") == "matched_token_id"
                return Part(
                    index=complete.sequence_index,
                    num_prompt_tokens=complete.prompt_tokens,
                    end=PartEnd(
                        complete.finish_reason,
                        complete.matched_token_id if has_match else None,
                        list(complete.output_token_ids),
                    ),
                )
        return None

    async def abort(self, request_id: str, timeout_s: float) -> None:
        """See Dialect."""
        await self._stub.Abort(self._pb.AbortRequest(request_id=request_id), timeout=timeout_s)


def _logprobs(token_ids: Sequence[int], entries: Sequence[Any], num_top: int) -> LogprobBatch | None:
    if not entries:
        return None
    if [entry.token_id for entry in entries] != list(token_ids):
        raise DialectError(f"log-probabilities of {len(entries)} tokens for {len(token_ids)} tokens")
    tops = [[(top.logprob, top.token_id) for top in entry.top_logprobs] for entry in entries]
    return with_alternatives([entry.logprob for entry in entries], tops, num_top)
