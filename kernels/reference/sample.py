"""Sampling row by row with a sort of the vocabulary: the rules of `kernels.sampling`, word for word."""

import math

import numpy as np
import torch

from kernels.reference.philox import token_words
from kernels.sampling import RowStatus, SampledTokens, SamplingBatch


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    """Draws one token per row by the rules of `kernels.sampling`.

    Args:
        logits: [S, vocab_size], float32, not changed.
        batch: sampling parameters of each row.
    Returns: results on the device of the logits; computed on the CPU.
    """
    device = logits.device
    logits, batch = logits.cpu(), batch.to("cpu")
    num_rows, vocab_size = logits.shape
    result = SampledTokens.undecided(num_rows, batch.max_top_logprobs)
    for i in range(num_rows):
        status, token_id = _sample_row(logits[i], batch, i)
        result.status[i] = status
        if status != RowStatus.OK:
            continue
        result.token_ids[i] = token_id
        if (num_top := int(batch.top_logprobs[i])) >= 0:
            logprobs = torch.log_softmax(logits[i].double(), dim=0)
            order = torch.sort(logits[i], descending=True, stable=True).indices[: min(num_top, vocab_size)]
            result.logprobs[i] = logprobs[token_id]
            result.top_ids[i, : len(order)] = order
            result.top_values[i, : len(order)] = logprobs[order]
    return result.to(device)


def _sample_row(raw: torch.Tensor, batch: SamplingBatch, i: int) -> tuple[RowStatus, int]:
    if raw.isnan().any() or raw.isposinf().any():
        return RowStatus.BAD_LOGITS, -1
    logits = adjusted_logits(raw, batch, i)
    if logits.isposinf().any():
        return RowStatus.BAD_LOGITS, -1
    logits = masked_logits(logits, batch, i)
    if logits.isneginf().all():
        return RowStatus.NO_CANDIDATE, -1
    if batch.forced_ids is not None and (forced_id := int(batch.forced_ids[i])) >= 0:
        return RowStatus.OK, forced_id
    temperature = float(batch.temperature[i])
    if temperature == 0:
        return RowStatus.OK, int(np.argmax(logits.numpy()))  # numpy guarantees the first of equal values
    kept, d = kept_tokens(logits, temperature, int(batch.top_k[i]), float(batch.top_p[i]), float(batch.min_p[i]))
    seed = int(batch.seed[i]) % 2**64
    words = token_words(seed, int(batch.position[i]), kept.numpy())
    u = (words.astype(np.float64) + 0.5) / 2**32
    scores = d.numpy() - np.log(-np.log(u))
    best = np.flatnonzero(scores == scores.max())
    return RowStatus.OK, int(kept.numpy()[best].min())


def adjusted_logits(raw: torch.Tensor, batch: SamplingBatch, i: int) -> torch.Tensor:
    """Applies penalties, then biases (step 1); returns [vocab_size] float32."""
    history = batch.history[int(batch.history_row[i]), : int(batch.num_tokens[i])].long()
    counts = torch.bincount(history[int(batch.num_prompt_tokens[i]) :], minlength=len(raw))
    seen = torch.bincount(history, minlength=len(raw)) > 0
    logits = raw.double()
    penalised = torch.where(logits > 0, logits / batch.repetition_penalty[i], logits * batch.repetition_penalty[i])
    logits = torch.where(seen, penalised, logits)
    logits = logits - batch.frequency_penalty[i] * counts
    logits = logits - batch.presence_penalty[i] * (counts > 0)
    entries = slice(int(batch.bias_start[i]), int(batch.bias_start[i + 1]))
    logits = logits.index_add(0, batch.bias_ids[entries].long(), batch.bias_values[entries].double())
    return logits.float()


def masked_logits(logits: torch.Tensor, batch: SamplingBatch, i: int) -> torch.Tensor:
    """Applies the mask of row i (end of step 1) to logits [vocab_size]."""
    if batch.masks is None or (mask := int(batch.masks.rows[i])) < 0:
        return logits
    bits = np.unpackbits(batch.masks.words[mask].numpy().view(np.uint8), bitorder="little")[: len(logits)]
    return torch.where(torch.from_numpy(bits) == 1, logits, -math.inf)


def kept_tokens(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Performs steps 2 and 3: finds the tokens that may be drawn.

    Args:
        logits: [vocab_size] float32; -inf is never kept.
        temperature, top_k, top_p, min_p: as in `SamplingBatch`; temperature > 0.
    Returns: ids of the kept tokens, most probable first, and their d; [num_kept] int64 and float64.
    """
    values, order = torch.sort(logits, descending=True, stable=True)
    d = (values.double() - values[0].double()) / temperature
    num_kept = int((values > -math.inf).sum())
    if min_p > 0:
        num_kept = int((d[:num_kept] >= math.log(min_p)).sum())
    if top_k > 0:
        num_kept = min(num_kept, top_k)
    if top_p < 1:
        weights = d[:num_kept].exp()
        before = weights.cumsum(0) - weights
        num_kept = max(1, int((before < top_p * weights.sum()).sum()))
    return order[:num_kept], d[:num_kept]
