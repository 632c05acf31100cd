"""Records the events of requests in preallocated arrays, in a few hundred nanoseconds each."""

import time
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from loadgen.causes import without_numbers
from loadgen.record import ABSENT, Status

MAX_ERRORS = 200
_OTHER_ERRORS = "other errors"


class Recorder:
    """Writes the rows of one worker's requests and its log of messages.

    Args:
        requests: [all requests] of REQUEST.
        chunks: [room] of CHUNK.
        progress: [1] of PROGRESS.
        on_new_error: called with every distinct error text, in the order of their indices.
        clock: nanoseconds.
    """

    def __init__(
        self,
        requests: NDArray[Any],
        chunks: NDArray[Any],
        progress: NDArray[Any],
        on_new_error: Callable[[str], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.clock = clock
        self.start_ns = 0
        self.status = requests["status"]
        self.scheduled_ns = requests["scheduled_ns"]
        self.retry_due_ns, self.resent_ns = requests["retry_due_ns"], requests["resent_ns"]
        self.num_retries, self.retry_lag_ns = requests["num_retries"], requests["retry_lag_ns"]
        self.sent_ns, self.first_ns, self.last_ns = requests["sent_ns"], requests["first_ns"], requests["last_ns"]
        self.ended_ns = requests["ended_ns"]
        self.num_chunks, self.num_tokens = requests["num_chunks"], requests["num_tokens"]
        self.server_input_tokens = requests["server_input_tokens"]
        self.server_cached_tokens = requests["server_cached_tokens"]
        self.server_output_tokens = requests["server_output_tokens"]
        self.server_queued_us, self.server_prefill_us = requests["server_queued_us"], requests["server_prefill_us"]
        self.server_preemptions = requests["server_preemptions"]
        self._error = requests["error"]
        self._chunk_request, self._chunk_tokens = chunks["request"], chunks["tokens"]
        self._chunk_arrived_ns = chunks["arrived_ns"]
        self._progress_chunks, self._progress_lost = progress["num_chunks"], progress["chunks_lost"]
        self._num_chunks = self._chunks_lost = 0
        self._on_new_error = on_new_error
        self._errors: dict[str, int] = {}

    def start(self, start_ns: int) -> None:
        """Sets the start of the run: all times are counted from it."""
        self.start_ns = start_ns

    def now_ns(self) -> int:
        """Returns the time since the start."""
        return self.clock() - self.start_ns

    def log(self, request: int, tokens: int, arrived_ns: int) -> None:
        """Records a message with tokens."""
        place = self._num_chunks
        if place == len(self._chunk_request):
            self._chunks_lost += 1
            self._progress_lost[0] = self._chunks_lost
            return
        self._chunk_request[place] = request
        self._chunk_tokens[place] = tokens
        self._chunk_arrived_ns[place] = arrived_ns
        self._num_chunks = self._progress_chunks[0] = place + 1

    def will_retry(self, request: int, due_ns: int) -> None:
        """Records when a refused request will be sent again, counted from the start."""
        self.retry_due_ns[request] = due_ns
        self.num_retries[request] += 1

    def ended(self, request: int, status: Status, error: str = "") -> None:
        """Records the end of a request."""
        if error:
            self._error[request] = self._error_number(error)
        self.ended_ns[request] = self.now_ns()
        self.status[request] = status

    def _error_number(self, text: str) -> int:
        if text not in self._errors:
            if len(self._errors) >= MAX_ERRORS:
                text = without_numbers(text)  # a server may put another number into it every time
            if len(self._errors) >= 2 * MAX_ERRORS:
                text = _OTHER_ERRORS
            if text not in self._errors:
                self._errors[text] = len(self._errors)
                self._on_new_error(text)
        return self._errors[text]


class CallNotes:
    """A Sink that records one call.

    Args:
        recorder: where it is recorded.
        request: index of its row.
        cancel_after: tokens after which to cancel the call; 0 is never.
        cancel: cancels it.

    Attributes:
        is_cancelled: whether this object cancelled the call.
        num_tokens: tokens received so far.
    """

    __slots__ = ("_cancel", "_cancel_after", "_num_chunks", "_recorder", "_request", "is_cancelled", "num_tokens")

    def __init__(self, recorder: Recorder, request: int, cancel_after: int, cancel: Callable[[], object]) -> None:
        self._recorder = recorder
        self._request = request
        self._cancel_after = cancel_after
        self._cancel = cancel
        self._num_chunks = 0
        self.is_cancelled = False
        self.num_tokens = 0

    def sent(self) -> None:
        """See Sink."""
        recorder, request = self._recorder, self._request
        now_ns = recorder.clock() - recorder.start_ns
        if recorder.num_retries[request]:
            recorder.resent_ns[request] = now_ns
            late_ns = now_ns - recorder.retry_due_ns[request]
            recorder.retry_lag_ns[request] = max(recorder.retry_lag_ns[request], late_ns)
        else:
            recorder.sent_ns[request] = now_ns
        recorder.status[request] = Status.IN_FLIGHT

    def started(self, num_input_tokens: int, num_cached_tokens: int) -> None:
        """See Sink."""
        self._recorder.server_input_tokens[self._request] = num_input_tokens
        self._recorder.server_cached_tokens[self._request] = num_cached_tokens

    def tokens(self, count: int) -> None:
        """See Sink."""
        recorder, request = self._recorder, self._request
        now_ns = recorder.clock() - recorder.start_ns
        if self._num_chunks == 0:
            recorder.first_ns[request] = now_ns
        self._num_chunks += 1
        self.num_tokens += count
        recorder.last_ns[request] = now_ns
        recorder.num_chunks[request] = self._num_chunks
        recorder.num_tokens[request] = self.num_tokens
        recorder.log(request, count, now_ns)
        if self._cancel_after and self.num_tokens >= self._cancel_after and not self.is_cancelled:
            self.is_cancelled = True
            self._cancel()

    def finished(
        self,
        num_output_tokens: int,
        *,
        queued_us: int = ABSENT,
        prefill_us: int = ABSENT,
        num_preemptions: int = ABSENT,
    ) -> None:
        """See Sink."""
        recorder, request = self._recorder, self._request
        recorder.server_output_tokens[request] = num_output_tokens
        recorder.server_queued_us[request] = queued_us
        recorder.server_prefill_us[request] = prefill_us
        recorder.server_preemptions[request] = num_preemptions
