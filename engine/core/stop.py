"""When an answer is over, as far as token ids can tell; stop texts are the frontend's business.

The token that ends an answer is part of the output. An end or stop token counts only from the `min_tokens`-th output
token on; the sampler does not draw one before, but a continuation may bring one along.
"""

from chairlift.service.end_reason import EndReason
from engine.core.request import Request


def finish_reason(request: Request, end_token_ids: frozenset[int]) -> EndReason | None:
    """Why the request ends with its newest token, or None if it goes on.

    Args:
        request: with `max_num_tokens` set; it may have no output yet.
        end_token_ids: the model's end tokens.
    """
    params = request.params
    output_ids = request.output_ids
    if output_ids and len(output_ids) >= params.min_tokens:
        token_id = output_ids[-1]
        if token_id in end_token_ids and not params.ignore_eos:
            return EndReason.END_TOKEN
        if token_id in params.stop_token_ids:
            return EndReason.STOP_TOKEN
    if len(request.prompt_ids) + len(output_ids) < request.max_num_tokens:
        return None
    return EndReason.MAX_TOKENS if len(output_ids) >= params.max_tokens else EndReason.CONTEXT_FULL
