"""The same figures from an exposition with dcgm-exporter 4.8's names, with 4.9's, and with both."""

from __future__ import annotations

import pytest

from podgpu.figures.device import DeviceFigures
from podgpu.figures.from_exposition import view_of_exposition
from podgpu.metrics.names import NameSet
from podgpu.metrics.parse import parse_text
from tests.nodes.node import FIXTURES
from tests.two_names import renamed

NODES = FIXTURES.parent / "nodes"
EXPOSITIONS = {
    "a real 4.8.2": FIXTURES / "h200" / "dcp_pod.prom",
    "podgpu, shared": NODES / "usage-time-sliced" / "expected.prom",
    "podgpu, MIG": NODES / "mig" / "expected.prom",
    "podgpu, MIG as dcgm-exporter has it": NODES / "mig-copy-parent" / "expected.prom",
    "podgpu, virtual GPUs": NODES / "usage-virtual-gpus" / "expected.prom",
}
MEASURED = ["", "DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_DEV_MEMORY_UTIL_RATIO", "DCGM_FI_PROF_DRAM_ACTIVE"]


def figures(exposition: str, measured: str = "") -> tuple[DeviceFigures, ...]:
    return view_of_exposition(parse_text(exposition), measured).devices


@pytest.mark.parametrize("names", ["4.9", "both"])
@pytest.mark.parametrize("exposition", EXPOSITIONS)
@pytest.mark.parametrize("measured", MEASURED)
def test_an_exposition_tells_the_same_under_other_names(exposition: str, names: NameSet, measured: str) -> None:
    text = EXPOSITIONS[exposition].read_text(encoding="utf-8")
    other = renamed(text, names)
    assert "DCGM_FI_DEV_GPU_TEMP_CELSIUS{" in other or "DCGM_FI_DEV_GPU_UTIL_RATIO{" in other
    assert figures(other, measured) == figures(text, measured)


@pytest.mark.parametrize("names", ["4.9", "both"])
def test_what_podgpu_prints_is_read_the_same(names: NameSet) -> None:
    """The golden nodes are one node under three sets of names."""
    (old,), (new,) = (
        figures((NODES / f"dcgm-names-{one}" / "expected.prom").read_text(encoding="utf-8")) for one in ("4.8", names)
    )
    assert new == old
    assert (new.node, new.utilization, new.memory_used, new.memory_total) == ("node-1", 0.94, 10 << 30, 81559 << 20)
    assert (new.power_watts, new.temperature) == (505.267, 59)


def test_utilisation_to_the_percent() -> None:
    for percent in range(101):
        exposition = f'DCGM_FI_DEV_GPU_UTIL_RATIO{{gpu="0",UUID="GPU-0"}} {percent / 100:.6f}\n'
        assert figures(exposition)[0].utilization == percent / 100


@pytest.mark.parametrize(
    ("name", "blank"),
    [
        ("DCGM_FI_DEV_FB_USED_BYTES", "9223372036854775794"),
        ("DCGM_FI_DEV_FB_USED_BYTES", "NaN"),
        ("DCGM_FI_DEV_FB_USED_BYTES", "-1"),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", "140737488355330"),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", "+Inf"),
    ],
)
def test_blanks_in_a_base_unit_do_not_pass(name: str, blank: str) -> None:
    exposition = f'{name}{{gpu="0",UUID="GPU-0"}} {blank}\nDCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-0"}} 40\n'
    (device,) = figures(exposition)
    assert (device.utilization, device.memory_used, device.temperature) == (None, None, 40)


def test_a_blank_under_one_name_does_not_hide_the_figure_under_the_other() -> None:
    of = '{gpu="0",UUID="GPU-0"}'
    for lines in (("GPU_UTIL", "50"), ("GPU_UTIL_RATIO", "-1")), (("GPU_UTIL", "-1"), ("GPU_UTIL_RATIO", "0.5")):
        exposition = "".join(f"DCGM_FI_DEV_{name}{of} {value}\n" for name, value in lines)
        assert figures(exposition)[0].utilization == 0.5
