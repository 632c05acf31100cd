"""How long answers will be, as far as the answers that ended tell.

The length of an answer is unknown until its end token. Answers to similar prompts of one class have similar lengths, so
ended answers are counted in cells: by class and length of the prompt, by length of the prompt alone, and all together.
The first cell that has seen enough is asked. What an answer will still have is a conditional expectation, given what it
has: it is refined as the answer grows.

Method: life table (Kaplan and Meier 1958, "Nonparametric estimation from incomplete observations") over bins of lengths
that grow by a factor of sqrt(2). An answer that was cut off counts as one that reached its length, not as one that
ended there. Answers that still run do not count, so estimates are low until the first long ones end. Pure.
"""

import math

from engine.core.latency.step_time import StepTimeModel
from engine.core.request import Request

_NUM_BINS = 42  # up to 2**21 tokens
_MIN_ENDS = 128.0  # ended answers from which a cell is asked
_MAX_ENDS = 512.0  # then old answers count half
_NEW_SHARE = 0.05  # of the ended answers that come before expectations are computed again
_MAX_CELLS = 1024


class _LifeTable:
    """Answers that ended in each bin of lengths, and that were cut off in it.

    Expectations are computed again when a twentieth of the answers is new.
    """

    __slots__ = ("_cut", "_ended", "_num_new", "_rests", "num_ends")

    def __init__(self) -> None:
        self.num_ends = 0.0
        self._ended = [0.0] * _NUM_BINS
        self._cut = [0.0] * _NUM_BINS
        self._num_new = 0
        self._rests: list[float] = []

    def add(self, index: int, *, is_complete: bool) -> None:
        """Counts an answer in the bin of its length."""
        counts = self._ended if is_complete else self._cut
        counts[index] += 1.0
        self._num_new += 1
        self.num_ends += is_complete
        if self.num_ends >= _MAX_ENDS:
            self.num_ends /= 2.0
            self._ended = [count / 2.0 for count in self._ended]
            self._cut = [count / 2.0 for count in self._cut]

    def rest(self, num_tokens: int) -> float:
        """Returns the expected further tokens of an answer of `num_tokens`; beyond all that was seen, 0."""
        if not self._rests or self._num_new > _NEW_SHARE * self.num_ends:
            self._rests = self._compute_rests()
            self._num_new = 0
        index = _bin_of(num_tokens)
        low, high = _START_OF_BIN[index], _START_OF_BIN[index + 1]
        rest, next_rest = self._rests[index], self._rests[index + 1]
        return rest + (next_rest - rest) * (num_tokens - low) / (high - low)

    def _compute_rests(self) -> list[float]:
        """Expected further tokens at the start of each bin, from the last one down; ends are even within a bin."""
        rests = [0.0] * (_NUM_BINS + 1)
        num_reached = 0.0
        for index in reversed(range(_NUM_BINS)):
            num_reached += self._ended[index] + self._cut[index]
            if num_reached:
                end_share = self._ended[index] / num_reached
                width = _START_OF_BIN[index + 1] - _START_OF_BIN[index]
                rests[index] = end_share * (width - 1) / 2.0 + (1.0 - end_share) * (width + rests[index + 1])
        return rests


class AnswerLengths:
    """Expected lengths of answers by service class and prompt length.

    Use: `note` when an answer ends; `expected_rest` or `expected_s` when a decision needs its length or its cost.

    Invariant: at most 1,024 cells are kept; answers of further ones count in wider cells alone.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[str | None, int | None], _LifeTable] = {}

    def note(self, request: Request, *, is_complete: bool) -> None:
        """Counts an answer that ended, or that was cut off if it is not complete."""
        index = _bin_of(len(request.output_ids))
        for key in _keys(request):
            cell = self._cells.get(key)
            if cell is None:
                if len(self._cells) >= _MAX_CELLS:
                    continue
                cell = self._cells[key] = _LifeTable()
            cell.add(index, is_complete=is_complete)

    def expected_rest(self, request: Request) -> float:
        """Returns how many further tokens an answer is expected to have, given those that it has.

        Returns: at most what the request may still have; 0 before 128 answers have ended.
        """
        for key in _keys(request):
            cell = self._cells.get(key)
            if cell is not None and cell.num_ends >= _MIN_ENDS:
                return min(cell.rest(len(request.output_ids)), float(request.max_num_tokens - request.num_tokens))
        return 0.0

    def expected_s(self, request: Request, model: StepTimeModel) -> float:
        """Returns the device time that the rest of an answer is expected to cost, without its share of a step."""
        num_rest = self.expected_rest(request)
        _, token_s, row_s, kv_token_s, _ = model.coefficients
        return num_rest * (token_s + row_s + kv_token_s * (request.num_tokens + num_rest / 2.0))


def _keys(request: Request) -> tuple[tuple[str | None, int | None], ...]:
    """Returns the cells of a request, the narrowest first."""
    prompt_bin = _bin_of(request.num_prompt_tokens)
    service_class = request.targets.service_class if request.targets is not None else ""
    return (service_class, prompt_bin), (None, prompt_bin), (None, None)


def _bin_of(num_tokens: int) -> int:
    return min(int(2.0 * math.log2(num_tokens + 1)), _NUM_BINS - 1)


_START_OF_BIN: list[int] = [math.ceil(2.0 ** (index / 2.0) - 1.0 - 1e-9) for index in range(_NUM_BINS + 1)]
