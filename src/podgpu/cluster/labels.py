"""LabelMemory keeps label sets from one rendering to the next: most of a cluster's series are the same every time."""

from __future__ import annotations

from collections.abc import Callable

from podgpu.metrics.encode import Labels

Names = tuple[str, ...]
Values = tuple[str, ...]


class _Sheet:
    """Label sets with the same names."""

    __slots__ = ("_before", "_kept", "_names")

    def __init__(self, names: Names) -> None:
        self._names = names
        self._kept: dict[Values, Labels] = {}
        self._before: dict[Values, Labels] = {}

    def of(self, values: Values) -> Labels:
        labels = self._kept.get(values)
        if labels is None:
            labels = self._before.get(values)
            if labels is None:
                labels = Labels(zip(self._names, values, strict=True))
            self._kept[values] = labels
        return labels

    def turn(self) -> bool:
        """Whether anything is left."""
        self._before, self._kept = self._kept, {}
        return bool(self._before)

    def __len__(self) -> int:
        return len(self._kept.keys() | self._before.keys())


class LabelMemory:
    """Keeps what the last rendering used, so that churn of pods leaves nothing behind."""

    def __init__(self) -> None:
        self._sheets: dict[Names, _Sheet] = {}

    def with_names(self, names: Names) -> Callable[[Values], Labels]:
        """What makes label sets with these names of their values."""
        sheet = self._sheets.get(names)
        if sheet is None:
            sheet = self._sheets[names] = _Sheet(names)
        return sheet.of

    def of(self, names: Names, values: Values) -> Labels:
        return self.with_names(names)(values)

    def next_rendering(self) -> None:
        """A rendering has ended: what it did not use is forgotten."""
        self._sheets = {names: sheet for names, sheet in self._sheets.items() if sheet.turn()}

    def __len__(self) -> int:
        return sum(map(len, self._sheets.values()))
