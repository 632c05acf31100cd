"""The values in force for one request, every one set: what it said, else the model's or the API's defaults."""

from google.protobuf.duration import from_nanoseconds

from chairlift.v1 import generation_service_pb2 as pb
from frontend.request.request import SamplingOptions, StopOptions


def effective_sampling(sampling: SamplingOptions) -> pb.SamplingOptions:
    """How its tokens are drawn."""
    return pb.SamplingOptions(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
    )


def effective_stop(stop: StopOptions) -> pb.StopOptions:
    """When its answer ends; the length limit has been decided."""
    return pb.StopOptions(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_texts=stop.stop_texts,
        stop_token_ids=stop.stop_token_ids,
        include_stop_text=stop.include_stop_text,
        ignore_end_token=stop.ignore_end_token,
        time_budget=None if stop.time_budget_s is None else from_nanoseconds(round(stop.time_budget_s * 1e9)),
    )
