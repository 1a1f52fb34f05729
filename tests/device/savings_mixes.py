"""Compares the predicted waiting time of mixes on one GPU with what the loads measured themselves.
Takes about six minutes:

    PYTHONPATH=src python3 tests/device/savings_mixes.py [--trial]

Needs one GPU with time slicing that nobody else uses, and PyTorch. Nothing of podgpu has to be
installed: only the model (`past/savings/slowdown.py`) is loaded. `--trial` runs without a GPU, with loads
that only sleep, so that all waiting times are about 0.

Each of twelve loads runs alone first. Its busy share alone is the only input of the prediction.
Then fourteen mixes of two to five loads run. The script prints both for each load, and exits 1 if

- fewer than twelve mixes had a summed busy share of up to 0.75,
- the mean error of these is above 4 points, or
- a mix that is called safe (all predicted slowdowns below 1.25) has a load slower than 1.5.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import NamedTuple

ALONE_SECONDS = 6.0
MIX_SECONDS = 14.0
START_SECONDS = 240.0
SAFE = 1.25
MOST_IF_SAFE = 1.5
MOST_MEAN_ERROR = 0.04
LEAST_MIXES = 12
FOLDER = Path(__file__).parent
# Name -> kind, milliseconds of work, period in milliseconds, options.
LOADS: dict[str, tuple[str, float, float, tuple[str, ...]]] = {
    "fft": ("fft", 14, 90, ("random",)),
    "sort": ("sort", 30, 240, ()),
    "softmax": ("softmax", 9, 75, ("random",)),
    "gather": ("gather", 22, 100, ()),
    "conv": ("conv", 45, 190, ("random",)),
    "attention": ("attention", 70, 420, ("random",)),
    "double": ("double", 18, 60, ()),
    "scan": ("scan", 6, 70, ("random", "clustered")),
    "special": ("special", 35, 110, ("random",)),
    "batched": ("batched", 12, 130, ("random", "clustered")),
    "transpose": ("transpose", 8, 110, ()),
    "histogram": ("histogram", 10, 95, ("random", "syncs")),
}
MIXES = (
    ("sort", "transpose"),
    ("scan", "batched"),
    ("softmax", "fft"),
    ("gather", "conv"),
    ("double", "special"),
    ("attention", "histogram"),
    ("scan", "transpose", "batched"),
    ("sort", "softmax", "fft"),
    ("gather", "attention", "transpose"),
    ("conv", "batched", "histogram"),
    ("double", "gather", "attention"),
    ("sort", "scan", "transpose", "batched"),
    ("fft", "softmax", "histogram", "attention"),
    ("sort", "scan", "transpose", "batched", "softmax"),
)


class Measured(NamedTuple):
    """Bursts of a load in a time."""

    bursts: int
    seconds: float  # sum of their durations
    elapsed: float


class Bench:
    def __init__(self, folder: Path, is_trial: bool) -> None:
        self._folder = folder
        self._go = folder / "go"
        self._go.write_text("")
        self._processes = []
        for name, (kind, busy, period, options) in LOADS.items():
            command = [sys.executable, str(FOLDER / "mixed_load.py"), name]
            command += ["sleep" if is_trial else kind, str(busy), str(period)]
            command += [str(self._log(name)), str(self._go), *options]
            self._processes.append(subprocess.Popen(command))

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def wait(self) -> None:
        """Waits until all loads have calibrated."""
        until = time.monotonic() + START_SECONDS
        while not all(self._is_ready(name) for name in LOADS):
            for process in self._processes:
                if process.poll() is not None:
                    sys.exit(f"a load ended with {process.returncode}: {process.args!r}")
            if time.monotonic() > until:
                sys.exit(f"the loads did not start within {START_SECONDS:.0f} s")
            time.sleep(0.2)
        for name in LOADS:
            print(self._log(name).read_text().splitlines()[0], flush=True)

    def _is_ready(self, name: str) -> bool:
        log = self._log(name)
        return log.exists() and log.stat().st_size > 0

    def run(self, names: tuple[str, ...], seconds: float) -> dict[str, Measured]:
        self._write_go(" ".join(names))
        time.sleep(0.5)
        began = time.monotonic()
        time.sleep(seconds)
        ended = time.monotonic()
        self._write_go("")
        time.sleep(0.6)  # bursts end
        return {name: self._measure(name, began, ended) for name in names}

    def _write_go(self, text: str) -> None:
        new = self._go.with_suffix(".new")
        new.write_text(text)
        new.rename(self._go)

    def _measure(self, name: str, began: float, ended: float) -> Measured:
        durations = []
        for line in self._log(name).read_text().splitlines():
            parts = line.split()
            if len(parts) == 2 and began < float(parts[0]) <= ended:
                durations.append(float(parts[1]))
        return Measured(len(durations), sum(durations), ended - began)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def load_model() -> ModuleType:
    """Loads the model from its file, so that the packages podgpu needs are not required."""
    path = FOLDER.parent.parent / "src" / "podgpu" / "past" / "savings" / "slowdown.py"
    spec = importlib.util.spec_from_file_location("slowdown", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    model = load_model()
    is_trial = "--trial" in sys.argv
    seconds = (2.0, 2.0) if is_trial else (ALONE_SECONDS, MIX_SECONDS)
    records: list[dict[str, object]] = []
    errors = []
    wrong = []
    scored = 0
    with tempfile.TemporaryDirectory(prefix="savings-mixes-") as name:
        bench = Bench(Path(name), is_trial)
        try:
            bench.wait()
            alone = {load: bench.run((load,), seconds[0])[load] for load in LOADS}
            for load, measured in alone.items():
                share = measured.seconds / measured.elapsed
                burst = 1e3 * measured.seconds / max(1, measured.bursts)
                print(f"alone {load:10} busy {share:6.1%}, a burst takes {burst:6.2f} ms")
            for mix in MIXES:
                together = bench.run(mix, seconds[1])
                busy = [alone[load].seconds / alone[load].elapsed for load in mix]
                total = sum(busy)
                counts = total <= model.MAX_BUSY
                waits = model.predict_waits(busy)
                predicted = [1 + wait / share for wait, share in zip(waits, busy, strict=True)]
                is_safe = counts and max(predicted) < SAFE
                scored += counts
                print(f"\nmix {' + '.join(mix)}: sum {total:.2f}{', called safe' * is_safe}")
                for load, share, wait, slower in zip(mix, busy, waits, predicted, strict=True):
                    measured = together[load]
                    burst = alone[load].seconds / max(1, alone[load].bursts)
                    own = max(1, measured.bursts) * burst
                    waited = (measured.seconds - own) / measured.elapsed
                    slowdown = measured.seconds / own
                    print(
                        f"  {load:10} alone {share:6.1%}  wait predicted {wait:6.1%}"
                        f" measured {waited:6.1%}  slowdown predicted {slower:5.2f}"
                        f" measured {slowdown:5.2f}",
                        flush=True,
                    )
                    row = {"load": load, "alone": round(share, 4), "wait": round(waited, 4)}
                    records.append(row | {"mix": " + ".join(mix), "slowdown": round(slowdown, 3)})
                    if counts:
                        errors.append(abs(wait - waited))
                    if is_safe and slowdown > MOST_IF_SAFE:
                        wrong.append(f"{load} in a safe mix was {slowdown:.2f} times slower")
        finally:
            bench.stop()

    mean = fmean(errors) if errors else 1.0
    worst = max(errors, default=1.0)
    print(f"\n{scored} mixes up to {model.MAX_BUSY}: {len(errors)} loads, mean error {mean:.2%}")
    print(f"worst error {worst:.2%}")
    print(json.dumps(records))
    if scored < LEAST_MIXES:
        wrong.append(f"only {scored} mixes were below the limit")
    if mean > MOST_MEAN_ERROR:
        wrong.append(f"the mean error is {mean:.2%}")
    print("WRONG: " + "; ".join(wrong) if wrong else "all within limits")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
