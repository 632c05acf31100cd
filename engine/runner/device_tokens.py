"""What the device knows of tokens: the last one of every row, and the history of rows with penalties.

With several steps in flight a step is built before the one that samples its tokens has ended. The host then sends
-1 - row where a token is missing, and the device looks it up here.
"""

import torch

from engine.runner.sampling_state import Int32Array
from engine.runner.stream import Stream


class DeviceTokens:
    """Tokens by state row. All methods but `stage` are device work, to be queued.

    Attributes:
        last_token_ids: [max_num_seqs] int64, the token sampled last for each row.
        history: [max_num_seqs, max_model_len] int32, prompt and output of penalised rows.
        is_host_record: whether `history` is the host's own record; then nothing of it is to be brought here.
    """

    def __init__(self, host_token_ids: Int32Array, stream: Stream, *, max_steps_in_flight: int) -> None:
        """Allocates.

        Args:
            host_token_ids: [max_num_seqs, max_model_len], the host's own record, which serves as history where the
                device can read it and no step is built before its tokens have landed there.
            stream: says what the device is.
            max_steps_in_flight: with one the host knows every token when a step is built.
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
        """The tokens of a row as `upload` wants them."""
        staged = self._stream.host_buffer(token_ids.nbytes).view(torch.int32)
        staged.numpy()[:] = token_ids
        return staged

    def upload(self, row: int, staged: torch.Tensor) -> None:
        """Makes these tokens the history of a row."""
        self.history[row, : len(staged)].copy_(staged, non_blocking=True)

    def resolve(self, input_ids: torch.Tensor) -> None:
        """Puts tokens in the place of references: id -1 - row becomes the token sampled last for that row."""
        rows = torch.bitwise_not(input_ids).clamp_min(0)  # ~id == -1 - id
        input_ids.copy_(torch.where(input_ids < 0, self.last_token_ids[rows], input_ids))

    def append(
        self, state_rows: torch.Tensor, num_tokens: torch.Tensor, token_ids: torch.Tensor, *, with_history: bool
    ) -> None:
        """Remembers what a step has sampled.

        Args:
            state_rows: [S] int64.
            num_tokens: [S] int32, tokens before these.
            token_ids: [S] int64; -1 for rows that failed, which go on with token 0 until the host takes them out: an
                embedding of -1 would be a fault of the whole device.
            with_history: whether any of the rows has penalties.
        """
        token_ids = token_ids.clamp_min(0)
        if self._is_ahead:
            self.last_token_ids[state_rows] = token_ids
        if with_history:
            self.history[state_rows, num_tokens.long()] = token_ids.int()
