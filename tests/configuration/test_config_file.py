"""dcgm-exporter's YAML configuration: both versions as its sources read them, and every mistake with its place."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from podgpu.configuration.collections import collection_of_fields
from podgpu.configuration.config_file import Collection, ConfigFile, Retention, parse_go_duration
from podgpu.configuration.config_yaml import parse_config_file
from podgpu.errors import UsageError
from podgpu.metrics.counters import Counter, parse_counters
from podgpu.metrics.names import renames

EXAMPLE = Path(__file__).parents[1] / "data" / "config_file.yaml"
COUNTERS = parse_counters(
    "DCGM_FI_DEV_GPU_TEMP,gauge,t\nDCGM_FI_DEV_POWER_USAGE,gauge,w\nDCGM_FI_DEV_SM_CLOCK,gauge,c\n", "counters.csv"
)


def parsed(text: str) -> ConfigFile:
    return parse_config_file(text.encode(), "c.yaml")


def refused(text: str) -> str:
    with pytest.raises(UsageError) as raised:
        parsed(text)
    return str(raised.value)


def test_version_2_whole() -> None:
    config = parse_config_file(EXAMPLE.read_bytes(), "c.yaml")
    assert config.counters is not None
    assert [c.name for c in config.counters] == [
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_SM_CLOCK",
    ]
    assert (config.exporter_metrics, config.interval, config.max_concurrent_scrapes) == (True, 30.0, 8)
    assert (config.bind_unbind, config.bind_unbind_interval) == (False, 1.0)
    assert config.retention == Retention(600.0, 0)
    (quick,) = config.collections
    assert (quick.name, quick.every, quick.retention) == ("quick-power", 2.0, Retention(0.0, 2))


def test_version_1_whole() -> None:
    config = parsed(
        "version: 1\n"
        "metrics: {file: /etc/podgpu/counters.csv, enableExporterMetrics: false}\n"
        "collection:\n"
        "  interval: 1m30s\n"
        "  retention: {maxAge: 5m}\n"
        "  watchGroups:\n"
        "    - {name: quick, interval: 500ms, fields: [DCGM_FI_DEV_POWER_USAGE], retention: {maxSamples: 3}}\n"
        "server: {maxConcurrentScrapes: 4}\n"
    )
    assert (config.counters_file, config.counters, config.exporter_metrics) == ("/etc/podgpu/counters.csv", None, False)
    assert (config.interval, config.retention) == (90.0, Retention(300.0, None))
    (quick,) = config.collections
    assert (quick.every, quick.retention.over(config.retention)) == (0.5, Retention(300.0, 3))


def test_retention_is_inherited_part_by_part() -> None:
    config = parsed(
        "version: 2\n"
        "sources: {dcgm: {watch: {maxKeepAge: 1m, maxKeepSamples: 7}}}\n"
        "collections:\n"
        "- {name: all, every: 5s, metrics: {include: ['*']}, sources: {dcgm: {watch: {maxKeepAge: 2m}}}}\n"
        "- {name: some, every: 1s, metrics: {include: [A]}, sources: {dcgm: {watch: {maxKeepSamples: 9}}}}\n"
    )
    assert config.retention == Retention(120.0, 7)
    assert config.collections[0].retention.over(config.retention) == Retention(120.0, 9)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "c.yaml:1:1", "version: is required"),
        ("{}", "c.yaml:1:1", "version: is required"),
        ("version: 3", "c.yaml:1:10", "podgpu knows 1 and 2, not 3"),
        ("version: '2'", "c.yaml:1:10", "whole number"),
        ("version: 2\nversion: 2", "c.yaml:2:1", "version is there twice"),
        ("version: 2\nmetric: {}", "c.yaml:2:1", "metric: there is no such key"),
        ("version: 2\ncollection: {interval: 1s}", "c.yaml:2:13", "belongs to version 1"),
        ("version: 1\ncollections: []", "c.yaml:2:14", "belongs to version 2"),
        ("version: 1\nsources: {dcgm: {watch: {}}}", "c.yaml:2:25", "belongs to version 2"),
        ("version: 2\nmetrics: {}", "c.yaml:2:10", "is empty"),
        ("version: 2\nmetrics: {file: a, fields: []}", "c.yaml:2:28", "not both"),
        ("version: 2\nmetrics: {fields: []}", "c.yaml:2:19", "is empty"),
        ("version: 2\nmetrics: {file: ''}", "c.yaml:2:17", "is empty"),
        ("version: 2\nmetrics: {file: [a]}", "c.yaml:2:17", "not a text"),
        ("version: 2\nmetrics: {enableExporterMetrics: maybe}", "c.yaml:2:34", "neither true nor false"),
        ("version: 2\nmetrics:\n  fields:\n  - {name: X, prometheusType: gauge}", "c.yaml:4:5", "help: is required"),
        (
            "version: 2\nmetrics:\n  fields:\n  - {name: DCGM_FI_DEV_GPU_TMP, prometheusType: gauge, help: t}",
            "c.yaml:4:12",
            "did you mean DCGM_FI_DEV_GPU_TEMP?",
        ),
        (
            "version: 2\nmetrics:\n  fields:\n  - {name: DCGM_FI_DEV_GPU_TEMP, prometheusType: gouge, help: t}",
            "c.yaml:4:50",
            "unknown type 'gouge'",
        ),
        (
            "version: 2\nmetrics:\n  fields:\n"
            "  - {name: DCGM_FI_DEV_GPU_TEMP, prometheusType: gauge, help: t}\n"
            "  - {name: DCGM_FI_DEV_GPU_TEMP, prometheusType: gauge, help: t}",
            "c.yaml:5:12",
            "is there twice",
        ),
        ("version: 2\ncollections: []", "c.yaml:2:14", "is empty"),
        ("version: 2\ncollections: {a: b}", "c.yaml:2:14", "not a list"),
        ("version: 2\ncollections:\n- {name: a, every: 1s}", "c.yaml:3:3", "include: is empty"),
        ("version: 2\ncollections:\n- {name: a, metrics: {include: [A]}}", "c.yaml:3:3", "every: is required"),
        ("version: 2\ncollections:\n- {every: 1s, metrics: {include: [A]}}", "c.yaml:3:3", "name: is required"),
        *(
            (f"version: 2\ncollections:\n- {{name: a, every: {every}, metrics: {{include: [A]}}}}", "c.yaml:3:20", why)
            for every, why in (
                ("0", "out of range"),
                ("0s", "out of range"),
                ("-1s", "not a duration"),
                ("99ms", "out of range"),
                ("100.5ms", "whole milliseconds"),
                ("25h", "out of range"),
                ("30", "not a duration"),
                ("soon", "not a duration"),
                ("[1s]", "not a text"),
            )
        ),
        (
            "version: 2\ncollections:\n- {name: a, every: 1s, metrics: {include: [A]}}\n"
            "- {name: a, every: 1s, metrics: {include: [B]}}",
            "c.yaml:4:10",
            "is there twice",
        ),
        (
            "version: 2\ncollections:\n- {name: a, every: 1s, metrics: {include: ['*']}}\n"
            "- {name: b, every: 1s, metrics: {include: ['*']}}",
            "c.yaml:4:10",
            "only one",
        ),
        (
            "version: 2\nsources: {dcgm: {watch: {maxKeepAge: 0s, maxKeepSamples: 0}}}\n",
            "c.yaml",
            "neither age nor number",
        ),
        (
            "version: 2\ncollections:\n- {name: a, every: 1s, metrics: {include: [A]}, "
            "sources: {dcgm: {watch: {maxKeepAge: 0s}}}}",
            "c.yaml:3:10",
            "neither age nor number",
        ),
        ("version: 2\nserver: {maxConcurrentScrapes: 0}", "c.yaml:2:32", "above 0"),
        ("version: 2\nserver: {maxConcurrentScrapes: -4}", "c.yaml:2:32", "whole number"),
        ("version: 2\n? [a]\n: b", "c.yaml:2:3", "not a text"),
        ("version: 2\n---\nversion: 2", "c.yaml:2:1", "not YAML"),
        ("version: 2\n\tmetrics: x", "c.yaml:2:1", "not YAML"),
        ("- version: 2", "c.yaml:1:1", "not a mapping"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, place: str, words: str) -> None:
    message = refused(text)
    assert message.startswith(f"{place}:"), message
    assert words in message
    assert "\n" not in message


def test_what_is_no_text() -> None:
    with pytest.raises(UsageError, match=r"c\.yaml: not UTF-8"):
        parse_config_file(b"\xff\xfe\x00v", "c.yaml")


def test_anchors_of_anchors_cost_nothing() -> None:
    """A billion laughs: what the aliases stand for is never written out."""
    text = "version: 2\nmetrics:\n  fields: &a [x, x, x, x, x, x, x, x, x]\n"
    lists = "".join(f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else '*a'] * 9)}]\n" for n in range(12))
    assert "there is no such key" in refused(text + lists)
    endless = "version: 2\ncollections: &c\n- {name: a, every: 1s, metrics: {include: *c}}\n"
    assert "not a text" in refused(endless)


# Durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1h30m", Fraction(5400)),
        ("1.5s", Fraction(3, 2)),
        (".5s", Fraction(1, 2)),
        ("500ms", Fraction(1, 2)),
        ("1us", Fraction(1, 10**6)),
        ("1µs", Fraction(1, 10**6)),
        ("0", Fraction(0)),
        ("0s", Fraction(0)),
        ("", None),
        ("5", None),
        ("-5s", None),
        ("1d", None),
        ("1 s", None),
        ("s", None),
        ("1s" * 40, None),
    ],
)
def test_durations_as_go_writes_them(text: str, seconds: Fraction | None) -> None:
    assert parse_go_duration(text) == seconds


# Which field belongs where


def chosen(*collections: tuple[str, ...], counters: tuple[Counter, ...] = COUNTERS) -> dict[str, str]:
    made = [Collection(f"c{n}", 1.0, patterns, place="c.yaml:1:1") for n, patterns in enumerate(collections)]
    found = collection_of_fields(counters, made)
    return {counter.name: found[counter.field.id].name for counter in counters if counter.field.id in found}


def test_names_and_patterns() -> None:
    assert chosen(("DCGM_FI_DEV_GPU_*",), ("DCGM_FI_DEV_SM_CLOC?",)) == {
        "DCGM_FI_DEV_GPU_TEMP": "c0",
        "DCGM_FI_DEV_SM_CLOCK": "c1",
    }
    assert chosen(("DCGM_FI_DEV_[A-P]*",)) == {"DCGM_FI_DEV_GPU_TEMP": "c0", "DCGM_FI_DEV_POWER_USAGE": "c0"}
    assert chosen(("DCGM_FI_DEV_[^GP]*",)) == {"DCGM_FI_DEV_SM_CLOCK": "c0"}
    assert chosen((r"DCGM\_FI_DEV_GPU_TEMP",)) == {"DCGM_FI_DEV_GPU_TEMP": "c0"}


def test_a_name_of_another_dcgm_is_the_same_field() -> None:
    assert chosen(("DCGM_FI_DEV_GPU_TEMP_CELSIUS",)) == {"DCGM_FI_DEV_GPU_TEMP": "c0"}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("DCGM_FI_DEV_FB_USED",), {"DCGM_FI_DEV_FB_USED_BYTES"}),
        (("DCGM_FI_DEV_FB_USE?",), {"DCGM_FI_DEV_FB_USED_BYTES"}),
        (("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"), {"DCGM_FI_DEV_GPU_UTIL_RATIO"}),
        (
            ("DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_TEMP"),
            {"DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_FB_USED_BYTES", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"},
        ),
        (("DCGM_FI_DEV_*_UTIL*",), {"DCGM_FI_DEV_GPU_UTIL_RATIO"}),
    ],
)
def test_each_name_of_4_8_is_the_figure_of_4_9(patterns: tuple[str, ...], names: set[str]) -> None:
    rows = ("DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_FB_USED_BYTES", "DCGM_FI_DEV_GPU_TEMP_CELSIUS")
    counters = parse_counters("".join(f"{name},gauge,x\n" for name in rows), "counters.csv")
    assert chosen(patterns, counters=counters).keys() == names


def test_every_figure_is_found_under_its_other_name() -> None:
    """Beside one that is found as it is written."""
    beside = "DCGM_FI_DEV_VGPU_LICENSE_STATUS"
    for rename in (r for r in renames() if r.old.type in ("int", "float")):
        for written, asked in ((rename.old_name, rename.new_name), (rename.new_name, rename.old_name)):
            counters = parse_counters(f"{written},gauge,x\n{beside},gauge,x\n", "counters.csv")
            assert chosen((beside, asked), counters=counters) == {written: "c0", beside: "c0"}


@pytest.mark.parametrize(
    ("collections", "words"),
    [
        ([("DCGM_FI_DEV_NVLINK_*",)], "none of the configured fields"),
        ([("DCGM_FI_DEV_GPU_TEMP",), ("DCGM_FI_DEV_GPU_*",)], "is in the collection c0 too"),
        ([("DCGM_[",)], "is not a pattern"),
        ([("DCGM_[z-a]",)], "is not a pattern"),
        ([("DCGM_\\",)], "is not a pattern"),
        ([("*" * 5000,)], "is not a pattern"),
    ],
)
def test_what_cannot_be_divided_is_said(collections: list[tuple[str, ...]], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        chosen(*collections)
    assert str(raised.value).startswith("c.yaml:1:1: ")


def test_a_pattern_of_many_stars_ends() -> None:
    with pytest.raises(UsageError, match="none of the configured"):
        chosen(("*A" * 100,))
