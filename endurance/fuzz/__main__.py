"""`python -m endurance.fuzz [TARGET...]`: a table of parsers and outcomes; exit code 1 when one let an error through.

What failed is written to fuzz-out/, as small as it could be made: `--case FILE TARGET` runs it again.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from endurance.fuzz.target import Failure, Result, Target, fuzz, replay
from endurance.fuzz.targets import TARGETS

Targets = Mapping[str, Target]
_BATCH = 20_000
_MOST_BYTES = 2 << 30
"""Of address space for a worker: what one case needs of it is far less."""


def main(arguments: Sequence[str] | None = None, targets: Targets = TARGETS) -> int:
    """`targets`: others than ours with one job only, as workers know them by their names."""
    parser = argparse.ArgumentParser(prog="python -m endurance.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="parsers to fuzz; all, unless named")
    parser.add_argument("--cases", type=int, default=1_000_000, help="for each parser")
    parser.add_argument("--seed", default="0", help="any word: another one draws other cases")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"))
    parser.add_argument("--case", type=Path, help="run this case of the one TARGET again")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.targets if name not in targets]
    if unknown or (options.case and len(options.targets) != 1):
        parser.error(f"name one of: {', '.join(targets)}")
    if options.case:
        return _again(targets[options.targets[0]], options.case)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return _run(options, targets)
    finally:
        logging.disable(before)


def _run(options: argparse.Namespace, targets: Targets) -> int:
    failures = []
    chosen = {name: targets[name] for name in options.targets or targets}
    print(f"{'parser':<28} {'cases':>9} {'cases/s':>9} {'outcomes':>8}  most frequent")
    for result in _results(chosen, options.cases, options.seed, options.jobs):
        print(row(result), flush=True)
        if result.failure:
            failures.append(result.failure)
            _keep(result.failure, options.out)
    print(f"{len(failures)} of {len(chosen)} parsers let something through")
    return 1 if failures else 0


def row(result: Result) -> str:
    rate = result.cases / result.seconds if result.seconds else 0.0
    often = ", ".join(f"{name} {100 * n / result.cases:.0f} %" for name, n in result.outcomes.most_common(3))
    line = f"{result.name:<28} {result.cases:>9} {rate:>9.0f} {len(result.outcomes):>8}  {often}"
    return line if result.failure is None else f"{line}\n  FAILED: {result.failure.what}: {result.failure.case[:200]!r}"


def _results(chosen: Targets, cases: int, seed: str, jobs: int) -> Iterator[Result]:
    """In the order of the names; each in batches, so that all cores are busy to the end."""
    if jobs == 1:
        yield from (fuzz(target, cases, seed) for target in chosen.values())
        return
    batches = [min(_BATCH, cases - start) for start in range(0, cases, _BATCH)]
    with ProcessPoolExecutor(jobs, initializer=_prepare) as pool:
        waiting = {
            name: [pool.submit(_batch, name, size, f"{seed}/{number}") for number, size in enumerate(batches)]
            for name in chosen
        }
        for name, parts in waiting.items():
            whole = Result(name)
            for part in parts:
                if whole.failure:
                    part.cancel()
                else:
                    whole.add(part.result())
            yield whole


def _prepare() -> None:
    logging.disable(logging.CRITICAL)
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))


def _batch(name: str, cases: int, seed: str) -> Result:
    return fuzz(TARGETS[name], cases, seed)


def _keep(failure: Failure, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    case = failure.case
    kind = "txt" if isinstance(case, str) else "bin"
    file = folder / f"{failure.target}.{kind}"
    file.write_bytes(case.encode("utf-8", "surrogatepass") if isinstance(case, str) else case)
    (folder / f"{failure.target}.trace").write_text(f"{failure.what}\n{failure.trace}", "utf-8", "backslashreplace")
    print(f"  saved: {file}; again with: python -m endurance.fuzz {failure.target} --case {file}")


def _again(target: Target, path: Path) -> int:
    content = path.read_bytes()
    outcome = replay(target, content.decode("utf-8", "surrogatepass") if path.suffix == ".txt" else content)
    print(outcome)
    return 1 if outcome.startswith("!") else 0


if __name__ == "__main__":
    sys.exit(main())
