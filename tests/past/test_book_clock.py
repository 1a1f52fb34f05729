"""The clock of the books: which time a round has, and when earlier rounds are moved."""

from __future__ import annotations

import pytest

from podgpu.clock import Clock
from podgpu.past.books.book_clock import BookClock, BookTime

START = 1_800_000_000.0


class Machine:
    """A machine that was booted 1000 s before podgpu started."""

    def __init__(self, last_round: float = 0.0) -> None:
        self.monotonic = 1000.0
        self.error = 0.0  # of the wall clock
        clock = Clock(lambda: self.monotonic, lambda: START + self.monotonic - 1000.0 + self.error)
        self.books = BookClock(clock, last_round)

    def read_at(self, second: float) -> BookTime:
        self.monotonic = 1000.0 + second
        return self.books.read()


@pytest.fixture
def machine() -> Machine:
    """Its clock has been stable for ten minutes."""
    machine = Machine()
    machine.read_at(600)
    return machine


def test_the_time_is_settled_ten_minutes_after_the_start() -> None:
    machine = Machine()
    assert machine.read_at(599) == BookTime(START + 599, is_settled=False)
    assert machine.read_at(600) == BookTime(START + 600, settled_shift=0.0)
    assert machine.read_at(615) == BookTime(START + 615)
    assert machine.books.jump == 0.0


def test_small_corrections_are_followed(machine: Machine) -> None:
    for second in range(615, 700, 15):
        machine.error += 1.5
        assert machine.read_at(second) == BookTime(START + second + machine.error)
    assert machine.books.now == START + 690 + machine.error
    assert machine.books.jump == 0.0


@pytest.mark.parametrize("error", [2.0, -4.0, 86_400.0, -START])
def test_a_jump_is_accepted_after_ten_minutes(machine: Machine, error: float) -> None:
    machine.error = error
    jumped = machine.read_at(615)
    assert jumped == BookTime(START + 615, is_settled=False)
    assert machine.books.jump == error
    machine.error = error + 1.5
    assert machine.read_at(630) == BookTime(START + 630, is_settled=False)
    assert machine.read_at(1214) == BookTime(START + 1214, is_settled=False)
    accepted = machine.read_at(1215)
    assert accepted._replace(settled_shift=None) == BookTime(START + 1215 + error + 1.5)
    assert accepted.settled_shift == pytest.approx(error + 1.5)
    assert machine.books.jump == 0.0
    assert machine.read_at(1230) == BookTime(START + 1230 + error + 1.5)
    assert machine.books.now == START + 1230 + error + 1.5


def test_after_an_accepted_jump_the_next_jump_is_noticed_again(machine: Machine) -> None:
    machine.error = 3600.0
    machine.read_at(615)
    machine.read_at(1215)
    machine.error = 0.0
    jumped = machine.read_at(1230)
    assert jumped == BookTime(START + 1230 + 3600, is_settled=False)
    assert machine.books.jump == -3600.0


def test_a_clock_that_returns_is_settled_at_once_and_moves_nothing(machine: Machine) -> None:
    machine.error = 3600.0
    machine.read_at(615)
    machine.error = 0.0
    assert machine.read_at(630) == BookTime(START + 630, settled_shift=0.0)
    assert machine.books.jump == 0.0
    assert machine.read_at(645) == BookTime(START + 645)
    # The next jump is one of its own.
    machine.error = 3600.0
    assert not machine.read_at(660).is_settled
    assert machine.read_at(1259).settled_shift is None
    assert machine.read_at(1260).settled_shift == 3600.0


def test_another_jump_starts_the_ten_minutes_again(machine: Machine) -> None:
    machine.error = 3600.0
    machine.read_at(615)
    machine.error = 3602.0
    # Usage since the first jump is open, so it must not be carried now.
    assert machine.read_at(1300) == BookTime(START + 1300, is_settled=False)
    assert machine.read_at(1899) == BookTime(START + 1899, is_settled=False)
    assert machine.read_at(1900) == BookTime(START + 1900 + 3602, settled_shift=3602.0)


def test_a_jump_soon_after_the_start_moves_all_rounds_since_the_start() -> None:
    """A machine without a battery starts in 1970, until NTP sets its clock."""
    machine = Machine()
    machine.error = -START
    machine.books = BookClock(machine.books._clock)
    assert machine.read_at(15) == BookTime(15, is_settled=False)
    machine.error = 0.0
    assert machine.read_at(30) == BookTime(30, is_settled=False)
    assert machine.read_at(630) == BookTime(START + 630, settled_shift=START)


def test_time_does_not_start_before_the_newest_record() -> None:
    machine = Machine(last_round=START + 3600)
    assert machine.books.now == START + 3600
    assert machine.read_at(15) == BookTime(START + 3615, is_settled=False)
    assert machine.books.jump == -3600.0
    assert machine.read_at(615) == BookTime(START + 615, settled_shift=-3600.0)
    assert Machine(last_round=START - 3600).books.now == START


def test_a_jump_that_returns_soon_after_the_start_starts_the_ten_minutes_again() -> None:
    machine = Machine()
    machine.error = 3600.0
    assert not machine.read_at(300).is_settled
    machine.error = 0.0
    assert machine.read_at(400) == BookTime(START + 400, is_settled=False)
    assert machine.books.jump == 0.0
    assert machine.read_at(999) == BookTime(START + 999, is_settled=False)
    assert machine.read_at(1000) == BookTime(START + 1000, settled_shift=0.0)
