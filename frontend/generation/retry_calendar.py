"""Calendar of prompt tokens that are promised to refused requests at the time of their retry. Pure: time is passed in.

Time is divided into slots. A slot holds at most a share of the prompt tokens that the engines compute in it, so that
requests that come for the first time find room too. New arrivals see booked tokens as load.
"""

import math

SLOT_S = 0.25
HORIZON_S = 30.0
BOOKABLE_SHARE = 0.8

_LEARNING_RATE = 1 / 16  # of the share of bookings that are kept; a few seconds of an overload


class RetryCalendar:
    """Books slots for prompt tokens.

    Invariants: no slot is booked above its capacity at the time of booking, except by 1 token of rounding; a booking
    has tokens in at least one slot that is not over; `num_slots` is at most the slots of the horizon and 2.

    Args:
        horizon_s: seconds from now within which a booking must fit.
        share: part of the measured rate that may be booked, above 0, at most 1.
    """

    def __init__(self, *, horizon_s: float = HORIZON_S, share: float = BOOKABLE_SHARE) -> None:
        self._horizon_s = horizon_s
        self._share = share
        self._tokens: dict[int, float] = {}  # by slot
        self._bookings: dict[int, dict[int, float]] = {}  # tokens by slot, by booking
        self._now_slot = 0
        self._kept_share = 1.0

    @property
    def kept_share(self) -> float:
        """Share of the last bookings whose clients came back, a moving average that begins at 1."""
        return self._kept_share

    @property
    def num_slots(self) -> int:
        """Slots with bookings."""
        return len(self._tokens)

    @property
    def num_bookings(self) -> int:
        """Bookings that are neither released nor over."""
        return len(self._bookings)

    def book(
        self, booking: int, num_tokens: int, *, earliest_s: float, now_s: float, tokens_per_second: float
    ) -> float | None:
        """Books the first slots with room, from one that starts at `earliest_s` or later.

        Args:
            booking: a number that no other booking has.
            num_tokens: prompt tokens, at least 1; more than a slot holds take the following slots too.
            earliest_s: seconds, as now_s.
            now_s: seconds of any clock.
            tokens_per_second: prompt tokens that the engines compute, above 0.

        Returns: start of the first slot in seconds; None: there is no room within the horizon.
        """
        self._forget_past(now_s)
        capacity = tokens_per_second * SLOT_S * self._share
        first = max(math.ceil(earliest_s / SLOT_S), self._now_slot + 1)
        end = math.floor((now_s + self._horizon_s) / SLOT_S) + 1
        head = min(float(num_tokens), capacity)
        while first < end and self._tokens.get(first, 0.0) + head > capacity:
            first += 1
        taken: dict[int, float] = {}
        left, slot = float(num_tokens), first
        while left > 0 and slot < end:
            room = min(capacity - self._tokens.get(slot, 0.0), left)
            if room > 0:
                taken[slot] = room
                left -= room
            slot += 1
        if left > 0:
            return None
        for slot, tokens in taken.items():
            self._tokens[slot] = self._tokens.get(slot, 0.0) + tokens
        self._bookings[booking] = taken
        return first * SLOT_S

    def release(self, booking: int) -> None:
        """Returns the tokens of a booking, whose request has come.

        An unknown one, made by another process or over, only counts as kept: its own process counts it as not kept.
        """
        self._note_kept(1.0)
        for slot, tokens in self._bookings.pop(booking, {}).items():
            self._take_from(slot, tokens)

    def booked_tokens(self, end_s: float, now_s: float) -> float:
        """Returns the tokens that are booked from the previous slot, whose requests may still come, until `end_s`.

        They are multiplied by `kept_share`: slots of clients that do not come back would stay empty.
        """
        self._forget_past(now_s)
        if not self._tokens:
            return 0.0
        last = math.floor(end_s / SLOT_S)
        return self._kept_share * sum(tokens for slot, tokens in self._tokens.items() if slot <= last)

    def _forget_past(self, now_s: float) -> None:
        """Forgets all slots before the previous one."""
        now_slot = math.floor(now_s / SLOT_S)
        if now_slot == self._now_slot:
            return
        self._now_slot = now_slot
        for slot in [slot for slot in self._tokens if slot < now_slot - 1]:
            del self._tokens[slot]
        for booking, slots in list(self._bookings.items()):
            if max(slots) < now_slot - 1:
                del self._bookings[booking]
                self._note_kept(0.0)

    def _note_kept(self, is_kept: float) -> None:
        self._kept_share += _LEARNING_RATE * (is_kept - self._kept_share)

    def _take_from(self, slot: int, tokens: float) -> None:
        if slot in self._tokens:
            self._tokens[slot] -= tokens
            if self._tokens[slot] <= 1e-6:
                del self._tokens[slot]

    def check_integrity(self) -> None:
        """Asserts the invariants; used by tests."""
        sums: dict[int, float] = {}
        for slots in self._bookings.values():
            assert max(slots) >= self._now_slot - 1, "a booking is over"
            for slot, tokens in slots.items():
                assert tokens > 0
                if slot >= self._now_slot - 1:
                    sums[slot] = sums.get(slot, 0.0) + tokens
        assert sums.keys() == self._tokens.keys()
        assert all(abs(sums[slot] - tokens) < 1e-3 for slot, tokens in self._tokens.items())
        assert self.num_slots <= self._horizon_s / SLOT_S + 2
