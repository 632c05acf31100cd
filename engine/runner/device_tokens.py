"""Tokens on the device: the last one of every row, and the history of rows with penalties.

With several steps in flight, a step is built before the previous one has sampled its tokens. The host then sends
-1 - row in place of the token, and the device replaces it with the last token of that row.
"""

import torch

from engine.runner.sampling_state import Int32Array
from engine.runner.stream import Stream


class DeviceTokens:
    """Tokens by state row. All methods but `stage` are device work, to be queued.

    Attributes:
        last_token_ids: [max_num_seqs] int64, the token sampled last for each row.
        history: [max_num_seqs, max_model_len] int32, prompt and output of penalised rows.
        is_host_record: whether `history` is the host's own record, which needs no upload.
    """

    def __init__(self, host_token_ids: Int32Array, stream: Stream, *, max_steps_in_flight: int) -> None:
        """Allocates the tensors.

        Args:
            host_token_ids: [max_num_seqs, max_model_len], the host's record. It is the history if the device can read
                it and only one step is in flight.
            stream: stream of the device.
            max_steps_in_flight: with 1, the host knows every token when a step is built.
        """
        self._stream = stream
        self._is_ahead = max_steps_in_flight > 1
        self.is_host_record = stream.is_inline and not self._is_ahead
        self.last_token_ids = torch.zeros(len(host_token_ids), dtype=torch.int64, device=stream.device)
        if self.is_host_record:
            self.history = torch.from_numpy(host_token_ids)
        else:
            self.history = torch.zeros(host_token_ids.shape, dtype=torch.int32, device=stream.device)

    def stage(self, token_ids: Int32Array) -> torch.Tensor:
        """Copies the tokens of a row to a buffer for `upload`."""
        staged = self._stream.host_buffer(token_ids.nbytes).view(torch.int32)
        staged.numpy()[:] = token_ids
        return staged

    def upload(self, row: int, staged: torch.Tensor) -> None:
        """Sets the history of a row."""
        self.history[row, : len(staged)].copy_(staged, non_blocking=True)

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
