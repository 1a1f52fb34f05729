"""Parser of dcgm-exporter's YAML configuration, and its error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.cli.exporter import ConfigFile, parse_config_file
from podgpu.clock import parse_duration
from podgpu.errors import UsageError
from podgpu.metrics.counters import CounterSpec, parse_counters
from podgpu.node.agent.schedule import Collection, collection_of_fields

EXAMPLE = Path(__file__).parents[1] / "data" / "config_file.yaml"
COUNTERS = parse_counters(
    "DCGM_FI_DEV_GPU_TEMP,gauge,t\nDCGM_FI_DEV_POWER_USAGE,gauge,w\nDCGM_FI_DEV_SM_CLOCK,gauge,c\n",
    "counters.csv",
)


def parsed(text: str) -> ConfigFile:
    return parse_config_file(text.encode(), "c.yaml")


def refused(text: str) -> str:
    with pytest.raises(UsageError) as raised:
        parsed(text)
    return str(raised.value)


def test_a_complete_file() -> None:
    config = parse_config_file(EXAMPLE.read_bytes(), "c.yaml")
    assert config.counters is not None
    assert [c.name for c in config.counters] == [
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_SM_CLOCK",
    ]
    assert config.options == {
        "collectors": None,
        "collect_interval": 30.0,
        "max_concurrent_scrapes": 8,
        "enable_exporter_metrics": True,
    }
    (quick,) = config.collections
    assert (quick.name, quick.every) == ("quick-power", 2.0)


def test_a_file_of_version_1() -> None:
    """Tests the only version of 4.8.3, which 4.8.4 accepts, too."""
    config = parsed(
        "version: 1\n"
        "metrics: {file: counters.csv}\n"
        "collection:\n"
        "  interval: 30s\n"
        "  retention: {maxAge: 10m, maxSamples: 0}\n"
        "  watchGroups:\n"
        "  - {name: quick, interval: 2s, fields: [DCGM_FI_DEV_POWER_USAGE, DCGM_FI_DEV_GPU_*]}\n"
        "  - {name: slow, interval: 1m, fields: [DCGM_FI_DEV_SM_CLOCK], retention: {maxAge: 1m}}\n"
        "server: {maxConcurrentScrapes: 8}\n"
    )
    assert (config.options["collectors"], config.options["collect_interval"]) == (
        "counters.csv",
        30.0,
    )
    assert [(one.name, one.every, one.include) for one in config.collections] == [
        ("quick", 2.0, ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_*")),
        ("slow", 60.0, ("DCGM_FI_DEV_SM_CLOCK",)),
    ]
    assert parsed("version: 1").options["collect_interval"] is None


GROUPS = "collection: {{watchGroups: [{{name: a, interval: {}, fields: [A]}}]}}"
ALL = "collections: [{name: a, every: 1s, metrics: {include: ['*']}}]"
COLLECTION = "version: 2\ncollections:\n- {{name: a, every: {}, metrics: {{include: [A]}}}}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing required field `version`"),
        ("version: 3", "version: invalid enum value 3"),
        (f"version: 1\n{ALL}", "version 1 has no collections: use collection, or version: 2"),
        (f"version: 2\n{GROUPS.format('1s')}", "version 2 has no collection: use collections"),
        (
            f"version: 1\n{GROUPS.format('1')}",
            "collection.watchGroups[0].interval: '1' is not a duration",
        ),
        ("version: 1\ncollection: {interval: 0s}", "collection.interval: '0s' is not a duration"),
        ("version: 2\nmetric: {}", "object contains unknown field `metric`"),
        (
            "version: 2\nmetrics: {file: a, fields: [{name: X, prometheusType: gauge, help: x}]}",
            "not both",
        ),
        (
            (
                "version: 2\nmetrics: {fields: [{name: DCGM_FI_DEV_GPU_TMP, prometheusType: gauge, "
                "help: t}]}"
            ),
            "did you mean DCGM_FI_DEV_GPU_TEMP?",
        ),
        (
            (
                "version: 2\nmetrics: {fields: [{name: DCGM_FI_DEV_GPU_TEMP, prometheusType: "
                "gouge, "
                "help: t}]}"
            ),
            "has the unknown type 'gouge'",
        ),
        (COLLECTION.format("0"), "collections[0].every: '0' is not a duration from 100ms to 24h"),
        (COLLECTION.format("30"), "not a duration"),
        (
            "version: 2\ncollections:\n- {name: a, every: 1s, metrics: {include: ['*']}}\n"
            "- {name: b, every: 1s, metrics: {include: ['*']}}",
            "only one",
        ),
        (
            "version: 2\ncollections:\n- {name: a, every: 1s, metrics: {include: ['*']}}\n"
            "- {name: a, every: 2s, metrics: {include: [B]}}",
            "collections[1]: the name 'a' is repeated",
        ),
        (
            "version: 1\ncollection:\n  watchGroups:\n"
            "  - {name: a, interval: 1s, fields: [A]}\n  - {name: a, interval: 2s, fields: [B]}",
            "collection.watchGroups[1]: the name 'a' is repeated",
        ),
        (
            "version: 2\nmetrics:\n  fields:\n"
            "  - {name: DCGM_FI_DEV_GPU_TEMP, prometheusType: gauge, help: t}\n"
            "  - {name: ' DCGM_FI_DEV_GPU_TEMP ', prometheusType: counter, help: t}",
            "metrics.fields[1]: the name 'DCGM_FI_DEV_GPU_TEMP' is repeated",
        ),
        (
            "version: 2\nserver: {maxConcurrentScrapes: 0}",
            "server.maxConcurrentScrapes: expected `int` >= 1",
        ),
        ("version: 2\n\tmetrics: x", "line 2: not YAML"),
        ("version: !!bool x", "not YAML that podgpu can read"),
        ("version: " + "[" * 20_000, "nested deeper than 100 levels"),
    ],
)
def test_errors_name_the_file_and_the_path(text: str, words: str) -> None:
    message = refused(text)
    assert message.startswith("c.yaml: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("1µs", 1e-6),
        ("0", 0.0),
        ("", None),
        ("5", None),
        ("-5s", None),
        ("1d", None),
    ],
)
def test_durations_as_go_writes_them(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def chosen(
    *collections: tuple[str, ...], counters: tuple[CounterSpec, ...] = COUNTERS
) -> dict[str, str]:
    made = [
        Collection(f"c{n}", 1.0, patterns, place="c.yaml:1:1")
        for n, patterns in enumerate(collections)
    ]
    found = collection_of_fields(counters, made)
    return {
        counter.name: found[counter.field.id].name
        for counter in counters
        if counter.field.id in found
    }


def test_names_and_patterns() -> None:
    assert chosen(("DCGM_FI_DEV_GPU_*",), ("DCGM_FI_DEV_SM_CLOC?",)) == {
        "DCGM_FI_DEV_GPU_TEMP": "c0",
        "DCGM_FI_DEV_SM_CLOCK": "c1",
    }
    assert chosen(("DCGM_FI_DEV_[A-P]*",)) == {
        "DCGM_FI_DEV_GPU_TEMP": "c0",
        "DCGM_FI_DEV_POWER_USAGE": "c0",
    }
    assert chosen(("DCGM_FI_DEV_[^GP]*",)) == {"DCGM_FI_DEV_SM_CLOCK": "c0"}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("DCGM_FI_DEV_FB_USED",), {"DCGM_FI_DEV_FB_USED_BYTES"}),
        (("DCGM_FI_DEV_FB_USE?",), {"DCGM_FI_DEV_FB_USED_BYTES"}),
        (("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"), {"DCGM_FI_DEV_GPU_UTIL_RATIO"}),
        (
            ("DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_TEMP"),
            {
                "DCGM_FI_DEV_GPU_UTIL_RATIO",
                "DCGM_FI_DEV_FB_USED_BYTES",
                "DCGM_FI_DEV_GPU_TEMP_CELSIUS",
            },
        ),
        (("DCGM_FI_DEV_*_UTIL*",), {"DCGM_FI_DEV_GPU_UTIL_RATIO"}),
    ],
)
def test_each_name_of_4_8_is_the_figure_of_4_9(patterns: tuple[str, ...], names: set[str]) -> None:
    rows = (
        "DCGM_FI_DEV_GPU_UTIL_RATIO",
        "DCGM_FI_DEV_FB_USED_BYTES",
        "DCGM_FI_DEV_GPU_TEMP_CELSIUS",
    )
    counters = parse_counters("".join(f"{name},gauge,x\n" for name in rows), "counters.csv")
    assert chosen(patterns, counters=counters).keys() == names


@pytest.mark.parametrize(
    ("collections", "words"),
    [
        ([("DCGM_FI_DEV_NVLINK_*",)], "no configured field matches"),
        ([("DCGM_FI_DEV_GPU_TEMP",), ("DCGM_FI_DEV_GPU_*",)], "is also in the collection c0"),
    ],
)
def test_what_cannot_be_divided_is_said(collections: list[tuple[str, ...]], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        chosen(*collections)
    assert str(raised.value).startswith("c.yaml:1:1: ")
