"""`--dcgm-names` and a counter file of the user over real HTTP: name and unit of each row, and the
host label.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest

from podgpu.metrics.counters import SHIPPED
from podgpu.metrics.fields import NameSet
from podgpu.node.agent.schedule import read_counters
from tests.nodes.node import Description, node_of
from tests.web.server import running

RATIO, UTIL = "DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_GPU_UTIL"
BYTES, MIB = "DCGM_FI_DEV_FB_USED_BYTES", "DCGM_FI_DEV_FB_USED"
HOT, HEAT = "DCGM_FI_DEV_GPU_TEMP_CELSIUS", "DCGM_FI_DEV_GPU_TEMP"


def exposition(folder: Path, names: Sequence[str], *arguments: str) -> str:
    rows = "".join(f"{name},gauge,x\n" for name in names)
    description = Description(
        about="one GPU at 94 %",
        gpus="1xH100",
        uuids=["GPU-00000000-1111-2222-3333-444444444444"],
        loads=[{"gpu": 0, "pid": 100, "duty": 0.94, "memory": (10 << 30) + 4096}],
        files={"counters.csv": rows},
        arguments=["--usage-from=none", "-f", f"{folder}/counters.csv", *arguments],
    )
    with node_of(description, folder) as node:
        node.take_turns()
        with running(node.agent) as client:
            return client.ask("/metrics").text


def values(text: str) -> list[tuple[str, float]]:
    return [
        (name, float(value))
        for name, value in re.findall(r"^(DCGM_\w+)\{.*\} (\S+)$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize(
    ("arguments", "names", "expected"),
    [
        pytest.param(
            [],
            [RATIO, BYTES],
            [(RATIO, 0.94), (BYTES, 10737422336)],
            id="4.9's names, nothing said",
        ),
        pytest.param(
            ["--dcgm-names", "4.8"], [BYTES], [(BYTES, 10737422336)], id="4.9's name in 4.8"
        ),
        pytest.param(
            ["--dcgm-names", "4.9"],
            [UTIL, MIB],
            [(UTIL, 94), (MIB, 10240)],
            id="4.8's names in 4.9",
        ),
        pytest.param([], [UTIL, MIB], [(UTIL, 94), (MIB, 10240)], id="4.8's names, nothing said"),
        pytest.param(
            ["--dcgm-names", "both"],
            [UTIL, BYTES],
            [(UTIL, 94), (MIB, 10240), (RATIO, 0.94), (BYTES, 10737422336)],
            id="one of each in both",
        ),
        pytest.param(
            ["--dcgm-names", "both"], [HOT], [(HOT, 59), (HEAT, 59)], id="renamed only, in both"
        ),
        pytest.param([], [HEAT, HOT], [(HEAT, 59)], id="of two names of one field the first"),
        pytest.param(
            ["--dcgm-names", "both"], [HEAT, HOT], [(HEAT, 59), (HOT, 59)], id="in both, both"
        ),
    ],
)
def test_a_row_is_printed_under_its_name_in_its_unit(
    folder: Path, arguments: list[str], names: list[str], expected: list[tuple[str, float]]
) -> None:
    assert values(exposition(folder, names, *arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "labels"),
    [
        ([], {"Hostname"}),
        (["--dcgm-names", "4.9"], {"hostname"}),
        (["--dcgm-names", "both"], {"Hostname", "hostname"}),
        (["--dcgm-names", "4.9", "--hostname-label", "Hostname"], {"Hostname"}),
        (["--dcgm-names", "both", "--hostname-label", "hostname"], {"hostname"}),
        (["--hostname-label", "hostname"], {"hostname"}),
        (["--dcgm-names", "both", "--no-hostname"], set()),
    ],
)
def test_the_host_label_follows_unless_it_is_chosen(
    folder: Path, arguments: list[str], labels: set[str]
) -> None:
    text = exposition(folder, [UTIL], *arguments)
    for family in ("DCGM_FI_DEV_GPU_UTIL", "podgpu_device_count", "podgpu_device_xid_errors_total"):
        lines = [line for line in text.splitlines() if line.startswith(f"{family}{{")]
        assert lines
        assert {
            name for line in lines for name in re.findall(r'([Hh]ostname)="node-1"', line)
        } == labels


@pytest.mark.parametrize("names", ["4.8", "4.9", "both"])
@pytest.mark.parametrize("short", ["default", "dcp", "1.x"])
def test_a_copy_of_a_shipped_file_follows_as_the_file_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: NameSet, short: str
) -> None:
    """podgpu's image has such copies in /etc/dcgm-exporter."""
    file = tmp_path / SHIPPED[short]
    text = files("podgpu.metrics").joinpath("counters", file.name).read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    with caplog.at_level(logging.INFO):
        counters, _ = read_counters(str(file), names)
    assert counters == read_counters(short, names)[0]
    assert caplog.text == ""


def test_one_row_more_makes_it_the_users(tmp_path: Path) -> None:
    file = tmp_path / SHIPPED["default"]
    text = files("podgpu.metrics").joinpath("counters", file.name).read_text(encoding="utf-8")
    file.write_text(f"{text}\n{BYTES},gauge,mine\n", encoding="utf-8")
    written = read_counters(str(file), "4.9")[0]
    assert written == (*read_counters("default", "4.8")[0], written[-1])
    assert written[-1].name == BYTES
