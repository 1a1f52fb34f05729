"""Reads the token counters and queues of LLM engines from their metrics text.

The names are in engines.csv. A pod's metrics are hostile input: only the lines of these families
are parsed, and the number of lines, models and buckets is limited.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from podgpu.charge import Tokens
from podgpu.errors import SourceError
from podgpu.metrics.fields import table_rows
from podgpu.metrics.parse import BadExposition, ParsedSample, is_web_page, parse_text

_MAX_LINES = 20_000  # of known families; an engine with 64 ranks and ten models writes 10,000
_MAX_MODELS = 16
_MAX_MODEL_NAME = 200
_MAX_BUCKETS = 64
MOST_TOKENS = 2.0**53  # larger floats do not count single tokens
# Labels that tell apart the series of one engine, whose counters are added up.
RANK_LABELS = (
    "engine",
    "is_streaming",
    "engine_type",
    "dp_rank",
    "tp_rank",
    "pp_rank",
    "version",
)
# Ranks of one model share a queue: SGLang may report it for each of them.
_SAME_QUEUE = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
_MATCHER = re.compile(r'([^{]+)(?:\{(\w+)="([^"]+)"\})?')
_NAME = re.compile(rb"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)")


class EngineFamily(NamedTuple):
    """The name of a series, and the value that a label must have."""

    name: str
    label: str = ""
    value: str = ""

    def selects(self, sample: ParsedSample) -> bool:
        if sample.name != self.name:
            return False
        return not self.label or sample.labels.get(self.label) == self.value


class Engine(NamedTuple):
    """A row of engines.csv. Of several names, an engine has the one of its version."""

    name: str
    prompt: EngineFamily  # counter
    transferred: EngineFamily | None  # the prompt tokens that another pod computed, and counted
    generated: EngineFamily  # counter
    running: Sequence[str]  # gauges
    waiting: Sequence[str]
    first_token: str  # histogram; empty if there is none
    cache: Sequence[str]  # ratio
    model: Sequence[str]  # labels
    port: int
    path: str

    @property
    def counters(self) -> tuple[EngineFamily, ...]:
        if self.transferred is None:
            return self.prompt, self.generated
        return self.prompt, self.generated, self.transferred

    @property
    def series(self) -> frozenset[str]:
        """The names of all series that are read."""
        names = {family.name for family in self.counters}
        names.update(self.running, self.waiting, self.cache)
        if self.first_token:
            names.add(f"{self.first_token}_bucket")
        return frozenset(names)


class Rank(NamedTuple):
    """A part of an engine with counters of its own, which may restart alone."""

    model: str  # empty if the engine reports no name
    labels: tuple[str, ...] = ()  # values of `RANK_LABELS`


class TokenCounters(NamedTuple):
    """The counters of a rank, or of all ranks of a model."""

    prompt: float = 0.0
    generated: float = 0.0
    transferred: float = 0.0  # prompt tokens that another pod computed, and counted

    def plus(self, other: TokenCounters) -> TokenCounters:
        return TokenCounters(
            self.prompt + other.prompt,
            self.generated + other.generated,
            self.transferred + other.transferred,
        )

    def since(self, before: TokenCounters) -> TokenCounters:
        """Returns the increase."""
        return TokenCounters(
            _increase(before.prompt, self.prompt),
            _increase(before.generated, self.generated),
            _increase(before.transferred, self.transferred),
        )


def _increase(before: float, now: float) -> float:
    # A counter that falls was restarted at 0.
    if now < before:
        return now
    return now - before


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What an engine has counted since its start, and its queue now."""

    engine: str
    ranks: Mapping[Rank, TokenCounters]
    running: float | None = None  # requests
    waiting: float | None = None
    cache_ratio: float | None = None
    first_token: Mapping[float, float] = field(default_factory=dict)
    """Upper bound in seconds -> number of requests whose first token came within it."""

    @property
    def counters(self) -> dict[str, TokenCounters]:
        """The sums by model."""
        return _add_ranks(self.ranks)

    def since(self, before: EngineReading) -> Tokens:
        """Returns the tokens of all models since an earlier reading."""
        increases = {}
        for rank, counters in self.ranks.items():
            increases[rank] = counters.since(before.ranks.get(rank, TokenCounters()))

        tokens = Tokens()
        for increase in _add_ranks(increases).values():
            computed = max(0.0, increase.prompt - increase.transferred)
            tokens = tokens.plus(Tokens(computed, increase.generated))
        return tokens

    def with_ranks_of(self, before: EngineReading) -> EngineReading:
        """Returns this reading, with the ranks that only an earlier reading had.

        A rank that is missing once has not restarted: its tokens must not count again.
        """
        if before.ranks.keys() <= self.ranks.keys():
            return self
        ranks = {**before.ranks, **self.ranks}
        # A pod that always reports other ranks must not fill the memory.
        if len(ranks) > _MAX_LINES or _count_models(ranks) > _MAX_MODELS:
            return self
        return replace(self, ranks=ranks)


def _add_ranks(ranks: Mapping[Rank, TokenCounters]) -> dict[str, TokenCounters]:
    sums: dict[str, TokenCounters] = {}
    for rank, counters in ranks.items():
        sums[rank.model] = sums.get(rank.model, TokenCounters()).plus(counters)
    return sums


def _count_models(ranks: Iterable[Rank]) -> int:
    return len({rank.model for rank in ranks})


@cache
def engines() -> tuple[Engine, ...]:
    """Returns the known engines, in the order in which they are looked for."""
    return tuple(_make_engine(row) for row in table_rows("engines.csv"))


def _make_engine(row: Mapping[str, str]) -> Engine:
    return Engine(
        name=row["engine"],
        prompt=_make_family(row["prompt"]),
        transferred=_make_family(row["transferred"]) if row["transferred"] else None,
        generated=_make_family(row["generated"]),
        running=_split(row["running"]),
        waiting=_split(row["waiting"]),
        first_token=row["first_token"],
        cache=_split(row["cache"]),
        model=_split(row["model"]),
        port=int(row["port"]),
        path=row["path"],
    )


def _make_family(text: str) -> EngineFamily:
    match = _MATCHER.fullmatch(text)
    assert match is not None
    return EngineFamily(match[1], match[2] or "", match[3] or "")


def _split(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("|")))


@cache
def _known_series() -> frozenset[bytes]:
    known: set[bytes] = set()
    for engine in engines():
        known.update(name.encode() for name in engine.series)
    return frozenset(known)


def read_engine(text: bytes) -> EngineReading:
    """Returns what the engine reports. Raises SourceError with a reason if it is unusable."""
    if is_web_page(text):
        raise SourceError("not_metrics", "it answers with a web page, not with metrics")

    samples = _parse_known(text)
    names = {sample.name for sample in samples}
    present = [engine for engine in engines() if engine.generated.name in names]
    if not present:
        raise SourceError("no_tokens", "its metrics have no token counters of a known engine")
    if len(present) > 1:
        both = " and ".join(engine.name for engine in present)
        raise SourceError("several_engines", f"its metrics have token counters of {both}")

    engine = present[0]
    return EngineReading(
        engine.name,
        _read_counters(engine, samples),
        running=_read_requests(engine.running, samples),
        waiting=_read_requests(engine.waiting, samples),
        cache_ratio=_read_ratio(engine, samples),
        first_token=_read_buckets(engine, samples),
    )


def _parse_known(text: bytes) -> list[ParsedSample]:
    """Parses only the lines of known series, so that other lines need not be valid."""
    known = _known_series()
    lines = []
    numbers = []  # of these lines in the text
    for number, line in enumerate(text.split(b"\n"), 1):
        match = _NAME.match(line)
        if match is not None and match[1] in known:
            lines.append(line)
            numbers.append(number)

    if len(lines) > _MAX_LINES:
        message = f"its metrics have {len(lines):,} series of the engine: at most {_MAX_LINES:,}"
        raise SourceError("too_many_series", message)

    lines.append(b"")
    try:
        families = parse_text(b"\n".join(lines).decode())
    except UnicodeDecodeError as error:
        raise SourceError("malformed", "its metrics are not UTF-8") from error
    except BadExposition as error:
        raise BadExposition(numbers[error.line - 1], error.why) from error

    samples: list[ParsedSample] = []
    for family in families:
        samples += family.samples

    return samples


def _read_counters(engine: Engine, samples: Iterable[ParsedSample]) -> dict[Rank, TokenCounters]:
    """Adds up the series that differ in no label of a rank."""
    counted: defaultdict[Rank, defaultdict[EngineFamily, float]]
    counted = defaultdict(lambda: defaultdict(float))
    for sample in samples:
        for family in engine.counters:
            if not family.selects(sample):
                continue
            if not 0 <= sample.value <= MOST_TOKENS:
                message = f"{sample.name} is {sample.value:g}: this is no number of tokens"
                raise SourceError("bad_value", message)

            labels = tuple(sample.labels.get(label, "") for label in RANK_LABELS)
            rank = Rank(_read_model(engine, sample), labels)
            counted[rank][family] += sample.value

    models = _count_models(counted)
    if models > _MAX_MODELS:
        message = f"it serves {models} models: at most {_MAX_MODELS} are read"
        raise SourceError("too_many_models", message)

    counters = {}
    for rank, sums in counted.items():
        transferred = 0.0
        if engine.transferred is not None:
            transferred = sums[engine.transferred]
        counters[rank] = TokenCounters(sums[engine.prompt], sums[engine.generated], transferred)

    return counters


def _read_model(engine: Engine, sample: ParsedSample) -> str:
    for label in engine.model:
        name = sample.labels.get(label, "")
        if name:
            return clean_model(name)
    return ""


def clean_model(name: str) -> str:
    """Returns the name as one short printable line. TensorRT-LLM may report `undefined`."""
    if name == "undefined":
        return ""
    printable = "".join(letter if letter.isprintable() else " " for letter in name)
    return printable[:_MAX_MODEL_NAME]


def _read_requests(names: Sequence[str], samples: Iterable[ParsedSample]) -> float | None:
    """Adds up the requests of all ranks that have a queue of their own.

    Returns None if a number is invalid, or if there are none.
    """
    values = []
    queues: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        # SGLang also reports the requests of each priority.
        if sample.name not in names or sample.labels.get("priority"):
            continue
        labels = [pair for pair in sample.labels.items() if pair[0] not in _SAME_QUEUE]
        queue = tuple(sorted(labels))
        queues[queue] = max(sample.value, queues.get(queue, 0.0))
        values.append(sample.value)

    if not _are_usable(values):
        return None
    return math.fsum(queues.values())


def _are_usable(values: Collection[float]) -> bool:
    return bool(values) and all(0 <= value <= MOST_TOKENS for value in values)


def _read_ratio(engine: Engine, samples: Iterable[ParsedSample]) -> float | None:
    """Returns the use of the fullest cache of the engine's ranks."""
    ratios = [sample.value for sample in samples if sample.name in engine.cache]
    if not _are_usable(ratios) or max(ratios) > 1:
        return None
    return max(ratios)


def _read_buckets(engine: Engine, samples: Iterable[ParsedSample]) -> dict[float, float]:
    buckets: dict[float, float] = defaultdict(float)
    for sample in samples:
        if not engine.first_token or sample.name != f"{engine.first_token}_bucket":
            continue
        try:
            bound = float(sample.labels.get("le", ""))
        except ValueError:
            return {}

        is_valid = bound >= 0 and 0 <= sample.value <= MOST_TOKENS
        if not is_valid:
            return {}
        buckets[bound] += sample.value

    if len(buckets) <= _MAX_BUCKETS:
        return dict(sorted(buckets.items()))
    return {}


def find_quantile(buckets: Mapping[float, float], quantile: float) -> float | None:
    """Returns the quantile of a histogram as PromQL's `histogram_quantile` does.

    None without observations, or without the bucket of all observations.
    """
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None

    wanted = quantile * total  # number of observations up to the quantile
    lower = 0.0
    below = 0.0  # number of observations up to `lower`
    for bound, count in sorted(buckets.items()):
        if count >= wanted:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)

        lower = bound
        below = count

    return None
