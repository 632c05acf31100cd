"""The gated delta rule, token by token; see `kernels.delta_rule`."""

import torch
from torch.nn import functional

from kernels.delta_rule import NORM_EPS, DeltaStates, DeltaWeights, check_delta
from kernels.metadata import AttentionMetadata
from kernels.reference.rms_norm import rms_norm


def delta_rule(
    x: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Computes each row from the state of its request; see `kernels.interface.KernelOps.delta_rule`."""
    heads = weights.heads
    slots = check_delta(x, gates, weights, states, metadata.state_slots).tolist()
    bounds, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    out = x.new_zeros(len(x), heads.value_size)
    for row, (slot, seq_len) in enumerate(zip(slots, seq_lens, strict=True)):
        first, end = bounds[row : row + 2]
        if seq_len == 0:
            continue  # padding of recorded steps
        if seq_len == end - first:
            states.conv[slot] = 0
            states.recurrent[slot] = 0
        inputs = torch.cat((states.conv[slot], x[first:end, : heads.num_channels].float()))
        states.conv[slot] = inputs[end - first :]
        windows = inputs.unfold(0, heads.conv_width, 1)  # [tokens, channels, width]
        mixed = functional.silu((windows * weights.conv.T).sum(-1))
        z = x[first:end, heads.num_channels :]
        for token in range(first, end):
            result = _next(mixed[token - first], gates[token].float(), weights, states.recurrent[slot])
            normed = rms_norm(result, weights.norm, weights.eps)
            out[token] = (normed.flatten() * functional.silu(z[token - first].float())).to(out.dtype)
    return out


def _next(mixed: torch.Tensor, gates: torch.Tensor, weights: DeltaWeights, state: torch.Tensor) -> torch.Tensor:
    """Updates the state [num_value_heads, key_dim, value_dim] by a token; returns [num_value_heads, value_dim]."""
    heads = weights.heads
    q, k, v = torch.split(mixed, [heads.key_size, heads.key_size, heads.value_size])
    groups = heads.num_value_heads // heads.num_key_heads
    q, k = (_unit(part.view(-1, heads.key_dim)).repeat_interleave(groups, dim=0) for part in (q, k))
    b, a = gates.chunk(2)
    decay = torch.exp(-weights.decay * functional.softplus(a + weights.dt_bias))
    state *= decay[:, None, None]
    error = v.view(heads.num_value_heads, -1) - torch.einsum("hkv,hk->hv", state, k)
    state += k[:, :, None] * (b.sigmoid()[:, None] * error)[:, None]
    result: torch.Tensor = torch.einsum("hkv,hk->hv", state, q) * heads.key_dim**-0.5
    return result


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Divides each row by its length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
