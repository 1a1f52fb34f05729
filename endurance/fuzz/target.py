"""What is fuzzed and how it is judged: one parser, its made-up input, the errors it may raise, and what must hold."""

from __future__ import annotations

import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import FrameType

from endurance.fuzz.mutate import Case, Make
from podgpu.errors import PodgpuError, SourceError

MOST_SECONDS = 2.0
"""Of CPU time for one case. What takes longer is a way to stop podgpu with one message."""
_MOST_TRIES = 3000


@dataclass(frozen=True)
class Target:
    name: str
    make: Make
    run: Callable[[Case], object]
    """Parses the case and asserts what must hold of the outcome."""
    errors: tuple[type[Exception], ...] = (SourceError,)
    """What it says it raises."""
    seconds: float = MOST_SECONDS


@dataclass(frozen=True)
class Failure:
    target: str
    case: Case
    """As small as it was made."""
    what: str
    trace: str


@dataclass
class Result:
    name: str
    cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None

    def add(self, other: Result) -> None:
        self.cases += other.cases
        self.seconds += other.seconds
        self.outcomes += other.outcomes
        self.failure = self.failure or other.failure


class _TooLong(BaseException):
    """No Exception: nothing that is fuzzed must be able to catch it."""


def fuzz(target: Target, cases: int, seed: str) -> Result:
    """So many cases, or as far as the first that fails."""
    rng = Random(f"{target.name}/{seed}")
    result = Result(target.name)
    began = time.process_time()
    with _bounded():
        for _ in range(cases):
            case = target.make(rng)
            outcome = _outcome(target, case)
            result.cases += 1
            if outcome.startswith("!"):
                result.failure = _smallest(target, case, outcome)
                break
            result.outcomes[outcome] += 1
    result.seconds = time.process_time() - began
    return result


def replay(target: Target, case: Case) -> str:
    """The outcome of one case; one that begins with ! is a failure."""
    with _bounded():
        return _outcome(target, case)


@contextmanager
def _bounded() -> Iterator[None]:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _outcome(target: Target, case: Case) -> str:
    """In a word; where nobody may see it, ! and the place it came from."""
    signal.setitimer(signal.ITIMER_VIRTUAL, target.seconds)
    try:
        value = target.run(case)
    except target.errors as error:
        return _complaint(error)
    except _TooLong:
        return f"!took longer than {target.seconds:g} s of CPU"
    except (Exception, RecursionError) as error:  # noqa: BLE001 - whatever else comes out is what is looked for
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"!{type(error).__name__} at {place.filename.rpartition('podgpu/')[2]}:{place.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "value" if value is not None else "none"


def _complaint(error: Exception) -> str:
    """A person reads it: one line, and printable."""
    if isinstance(error, PodgpuError) and not _is_one_line(str(error)):
        return f"!{type(error).__name__} is not one line of text that could be printed"
    reason = getattr(error, "reason", "")
    return f"{type(error).__name__} {reason}".strip()


def _is_one_line(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\n" not in text and "\r" not in text and "\x1b" not in text


def _smallest(target: Target, case: Case, outcome: str) -> Failure:
    """Parts are taken away as long as the outcome stays the same."""
    tries, step = 0, max(1, len(case) // 2)
    while step and tries < _MOST_TRIES and "took longer" not in outcome:
        at, smaller = 0, False
        while at < len(case) and tries < _MOST_TRIES:
            shorter = case[:at] + case[at + step :]
            tries += 1
            if _outcome(target, shorter) == outcome:
                case, smaller = shorter, True
            else:
                at += step
        step = step if smaller and step == 1 else step // 2
    return Failure(target.name, case, outcome[1:], _trace(target, case))


def _trace(target: Target, case: Case) -> str:
    try:
        if "took longer" not in _outcome(target, case):
            target.run(case)
    except Exception:  # noqa: BLE001 - it is shown
        return traceback.format_exc()
    return ""
