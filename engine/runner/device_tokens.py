"""Tokens on the device: the last one of every row, and the history of rows with penalties.

With several steps in flight, a step is built before the previous one has sampled its tokens. The host then sends
-1 - row in place of the token, and the device replaces it with the last token of that row.
"""

from collections.abc import Sequence

import torch

from engine.runner.sampling_state import Int32Array
from engine.runner.stream import Stream

_STAGED_TOKENS = 4096
"""Tokens of a staging buffer."""


class DeviceTokens:
    """Tokens by state row. All methods but `stage` are device work, to be queued.

    Attributes:
        last_token_ids: [max_num_seqs] int64, the token sampled last for each row.
        history: [max_num_seqs, max_model_len] int32, prompt and output of penalised rows.
        is_host_record: whether `history` is the host's own record, which needs no upload.
    """

    def __init__(
        self, host_token_ids: Int32Array, stream: Stream, *, max_steps_in_flight: int, is_ahead: bool | None = None
    ) -> None:
        """Allocates the tensors.

        Args:
            host_token_ids: [max_num_seqs, max_model_len], the host's record. It is the history if the device can read
                it and no step is ahead of it.
            stream: stream of the device.
            max_steps_in_flight: steps that may be launched before the first is collected.
            is_ahead: whether a step may be built before the host knows the tokens that it reads; None: if several are
                in flight.

        Staging buffers stay in the stream's pool, one for each row and step in flight: allocating pinned memory during
        a step would stall it. That suffices if all rows get histories of up to 4,096 tokens in every step.
        """
        self._stream = stream
        self._is_ahead = max_steps_in_flight > 1 if is_ahead is None else is_ahead
        self.is_host_record = stream.is_inline and not self._is_ahead
        self.last_token_ids = torch.zeros(len(host_token_ids), dtype=torch.int64, device=stream.device)
        if self.is_host_record:
            self.history = torch.from_numpy(host_token_ids)
        else:
            self.history = torch.zeros(host_token_ids.shape, dtype=torch.int32, device=stream.device)
            _ = [self._staging_buffer() for _ in range(len(host_token_ids) * max_steps_in_flight)]

    def stage(self, token_ids: Int32Array) -> list[torch.Tensor]:
        """Copies the tokens of a row to buffers for `upload`."""
        pieces = []
        for start in range(0, len(token_ids), _STAGED_TOKENS):
            piece = token_ids[start : start + _STAGED_TOKENS]
            pieces.append(self._staging_buffer()[: len(piece)])
            pieces[-1].numpy()[:] = piece
        return pieces

    def upload(self, row: int, staged: Sequence[torch.Tensor]) -> None:
        """Sets the history of a row."""
        for start, piece in zip(range(0, len(staged) * _STAGED_TOKENS, _STAGED_TOKENS), staged, strict=True):
            self.history[row, start : start + len(piece)].copy_(piece, non_blocking=True)

    def _staging_buffer(self) -> torch.Tensor:
        """Returns memory for _STAGED_TOKENS; all buffers have the same size, so that any one replaces another."""
        return self._stream.host_buffer(4 * _STAGED_TOKENS).view(torch.int32)

    def resolve(self, input_ids: torch.Tensor) -> None:
        """Replaces references: id -1 - row becomes the token sampled last for that row."""
        rows = torch.bitwise_not(input_ids).clamp_min(0)  # ~id == -1 - id
        input_ids.copy_(torch.where(input_ids < 0, self.last_token_ids[rows], input_ids))

    def append(
        self, state_rows: torch.Tensor, num_tokens: torch.Tensor, token_ids: torch.Tensor, *, with_history: bool
    ) -> None:
        """Stores the sampled tokens of a step.

        Args:
            state_rows: [S] int64.
            num_tokens: [S] int32, tokens before these.
            token_ids: [S] int64; -1 for rows that failed. They continue with token 0 until the host removes them,
                because an embedding of -1 would be a device fault.
            with_history: whether any of the rows has penalties.
        """
        token_ids = token_ids.clamp_min(0)
        if self._is_ahead:
            self.last_token_ids[state_rows] = token_ids
        if with_history:
            self.history[state_rows, num_tokens.long()] = token_ids.int()
