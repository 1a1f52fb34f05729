"""The listener drains its log in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.gpu.nvml.switch_splitter import SwitchListener


class Log:
    """An empty log that records when it is drained. A system call takes a millisecond."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.drained = [self.time]

    def drain(self) -> bytes:
        self.time += 0.001
        self.drained.append(self.time)
        return b""

    def now(self) -> int:
        return int(self.time * 1e9)

    def is_busy(self) -> bool:
        self.time += 0.001
        return False

    def close(self) -> None:
        pass


@pytest.mark.parametrize("unsampled", ["", "not measured"])
@given(turns=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=20))
def test_the_log_is_drained_often_enough(unsampled: str, turns: list[float]) -> None:
    """Windows are taken at any time and drain the log too."""
    log = Log()
    listener = SwitchListener(
        log, unsampled=unsampled, wall=lambda: log.time, clock=lambda: log.time, in_background=False
    )
    step_at = log.time + listener.step()
    for turn in turns:
        window_at = log.time + turn
        while step_at < window_at:
            log.time = max(log.time, step_at)
            step_at = log.time + listener.step()
        log.time = max(log.time, window_at)
        listener.take_window(log.time)
    longest = max(b - a for a, b in zip(log.drained, log.drained[1:], strict=False))
    assert longest < 2.0 + 0.1
