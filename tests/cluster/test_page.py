"""An exporter's page to a node's reading; the quick way through the next page says what the exact way says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.reading import NamespaceCounters, NodeReading
from podgpu.cluster.scraping.page import PageReader, _Holed, names_read
from podgpu.cluster.scraping.page_chunks import Chunks
from podgpu.errors import SourceError

NODES = Path(__file__).parents[1] / "nodes"
GOLDEN = sorted(path.parent.name for path in NODES.glob("*/expected.prom"))
SHARED = (NODES / "usage-time-sliced" / "expected.prom").read_text(encoding="utf-8")


def read(
    page: str | bytes, measured: str = "DCGM_FI_DEV_MEM_COPY_UTIL", wall: float = 0.0, **options: object
) -> NodeReading:
    body = page.encode() if isinstance(page, str) else page
    return PageReader("http://h:9400/metrics", "h:9400", measured, **options).read(body, 7.0, wall)  # type: ignore[arg-type]


def series(name: str, value: str = "1", **labels: str) -> str:
    pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value}\n"


GPU = {"gpu": "0", "UUID": "GPU-1", "modelName": "H100", "Hostname": "node-1"}


# What is on a page


def test_a_node_of_podgpu() -> None:
    node = read(SHARED)
    assert (node.target, node.node, node.named, node.read_at) == ("http://h:9400/metrics", "node-1", True, 7.0)
    assert node.taken_at is not None
    shared = next(d for d in node.devices if len(d.holders) > 1)
    assert all(h.share is not None and h.share < 1 for h in shared.holders)
    assert {d.node for d in node.devices} == {"node-1"}
    assert node.namespaces
    for counters in node.namespaces:
        assert counters.model
        assert None not in counters


def test_what_is_measured_is_of_the_field_asked_for() -> None:
    page = series("DCGM_FI_DEV_MEM_COPY_UTIL", "12", **GPU) + series("DCGM_FI_DEV_GPU_UTIL", "34", **GPU)
    page += series("my_own_figure", "56", **GPU)
    assert read(page).devices[0].measured == 12
    assert read(page, "DCGM_FI_DEV_GPU_UTIL").devices[0].measured == 34
    assert read(page, "dcgm_gpu_utilization").devices[0].measured == 34, "another generation's name of it"
    assert read(page, "my_own_figure").devices[0].measured == 56
    assert read(page, "DCGM_FI_DEV_FB_USED").devices[0].measured is None


def test_namespaces() -> None:
    page = series("DCGM_FI_DEV_GPU_UTIL", **GPU)
    page += series("podgpu_namespace_gpu_allocated_seconds_total", "10", namespace="a", modelName="H100")
    page += series("podgpu_namespace_gpu_energy_joules_total", "20", namespace="a", modelName="H100")
    page += series("podgpu_namespace_gpu_busy_seconds_total", "5", namespace="b", modelName="L4")
    assert read(page).namespaces == (
        NamespaceCounters("a", "H100", 10.0, None, 20.0),
        NamespaceCounters("b", "L4", None, 5.0, None),
    )


def test_one_uuid_under_several_models_is_several_devices() -> None:
    """Seed 002's own data."""
    page = "".join(
        series("DCGM_FI_DEV_GPU_UTIL", "1", **GPU | {"modelName": model, "pod": pod, "namespace": "default"})
        for model, pod in [("4080ti", "test2"), ("2080ti", "test2"), ("2080ti", "test4"), ("2040ti", "test2")]
    )
    found = {(d.uuid, d.model): [h.holder.pod for h in d.holders] for d in read(page).devices}
    assert found == {
        ("GPU-1", "4080ti"): ["test2"],
        ("GPU-1", "2080ti"): ["test2", "test4"],
        ("GPU-1", "2040ti"): ["test2"],
    }


def test_what_names_no_model_goes_to_the_device_that_has_one() -> None:
    held = {"gpu": "0", "UUID": "GPU-1", "namespace": "a", "pod": "p", "container": "c"}
    for page in (
        series("podgpu_allocation_info", **held) + series("DCGM_FI_DEV_GPU_UTIL", **GPU),
        series("DCGM_FI_DEV_GPU_UTIL", **GPU) + series("podgpu_allocation_share_ratio", "0.5", **held),
    ):
        (device,) = read(page).devices
        assert (device.model, [h.holder.pod for h in device.holders]) == ("H100", ["p"])


def test_prometheus_own_renaming_is_undone() -> None:
    target = {"pod": "dcgm-exporter-x", "namespace": "gpu-operator", "container": "exporter"}
    real = {"exported_pod": "train", "exported_namespace": "research", "exported_container": "main"}
    (device,) = read(series("DCGM_FI_DEV_GPU_UTIL", **GPU, **target, **real)).devices
    (holder,) = device.holders
    assert (holder.holder.namespace, holder.holder.pod, holder.holder.container) == ("research", "train", "main")


def test_names_of_dcgm_exporter_1() -> None:
    labels = {"gpu": "0", "uuid": "GPU-1", "pod_name": "p", "pod_namespace": "n", "container_name": "c"}
    node = read(series("dcgm_gpu_utilization", "40", **labels) + series("dcgm_mem_copy_utilization", "9", **labels))
    (device,) = node.devices
    assert (device.uuid, device.utilization, device.measured) == ("GPU-1", 0.4, 9)
    assert device.holders[0].holder.pod == "p"
    assert (node.node, node.named) == ("h:9400", False)
    assert device.node == "h:9400"


@pytest.mark.parametrize(
    ("labels", "wanted", "node"),
    [
        ({"Hostname": "a", "node": "b"}, None, "a"),
        ({"Hostname": "", "hostname": "b"}, None, "b"),
        ({"Hostname": "a", "kubernetes_node": "k"}, ("kubernetes_node", "Hostname"), "k"),
        ({"Hostname": "a"}, ("kubernetes_node",), "h:9400"),
    ],
)
def test_the_nodes_name(labels: dict[str, str], wanted: tuple[str, ...] | None, node: str) -> None:
    options = {} if wanted is None else {"node_labels": wanted}
    found = read(series("DCGM_FI_DEV_GPU_UTIL", gpu="0", UUID="GPU-1", **labels), **options)
    assert found.node == node
    assert found.named == (node != "h:9400")


def test_several_nodes_on_a_page_are_noted() -> None:
    page = "".join(series("DCGM_FI_DEV_GPU_UTIL", **GPU | {"UUID": f"GPU-{n}", "Hostname": f"n{n}"}) for n in range(5))
    (note,) = read(page).notes
    assert "5 nodes (n0, n1, n2)" in note


def test_a_podgpu_without_gpus_is_a_node_all_the_same() -> None:
    page = series("podgpu_exporter_build_info", version="1") + series(
        "podgpu_device_count", "0", state="visible", Hostname="n"
    )
    page += series("podgpu_exporter_source_up", "0", source="nvml")
    node = read(page)
    assert (node.node, node.devices, node.notes) == ("n", (), ("the exporter cannot read: nvml",))


def test_a_clock_ahead_is_skew_and_one_behind_may_be_age() -> None:
    page = series("DCGM_FI_DEV_GPU_UTIL", **GPU) + "podgpu_exporter_snapshot_timestamp_seconds 1000.0\n"
    assert (read(page, wall=1000.0).taken_at, read(page, wall=1000.0).skew_seconds) == (1000.0, None)
    assert read(page, wall=996.0).skew_seconds is None
    assert read(page, wall=900.0).skew_seconds == 100.0
    assert read(page, wall=5000.0).skew_seconds is None


@pytest.mark.parametrize(
    ("page", "reason"), [("up 1\n", "no_gpu"), ("", "no_gpu"), ("a 1", "malformed"), (b"a\xff 1\n", "malformed")]
)
def test_what_is_refused(page: str | bytes, reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        read(page)
    assert caught.value.reason == reason
    assert "http://h:9400/metrics" in str(caught.value)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_golden_page(name: str) -> None:
    page = (NODES / name / "expected.prom").read_bytes()
    if name in ("no-driver",):
        assert read(page).devices == ()
    else:
        assert all(d.uuid for d in read(page).devices)


# Two ways through a page

_SAMPLE = re.compile(r"^([^#\n]*) (\S+)$", re.MULTILINE)


def outcome(reader: PageReader, page: str) -> object:
    try:
        return reader.read(page.encode("utf-8", "surrogatepass"), 1.0, 0.0)
    except SourceError as error:
        return error.reason, str(error)


def told_alike(reader: PageReader, page: str) -> None:
    """The reader that knows the page before says what one says that has never seen any."""
    fresh = PageReader("t", "a")
    assert repr(outcome(reader, page)) == repr(outcome(fresh, page))  # repr: NaN equals itself there


def known(page: str = SHARED) -> PageReader:
    """A reader that has read this page, and knows of pages what others have seen."""
    reader = PageReader("t", "a", chunks=Chunks(names_read()))
    outcome(reader, page)
    return reader


def learned_quickly(reader: PageReader, page: str) -> bool:
    """Without the parser, that is: the reader has never seen such series, others have."""
    chunks = reader._chunks
    assert chunks is not None
    holed = _Holed.of(page)
    return holed is not None and chunks.samples(holed.text, holed.numbers) is not None


def is_quick(reader: PageReader, page: str) -> bool:
    before = reader._known
    outcome(reader, page)
    return before is not None and reader._known is before


def test_other_numbers_take_the_quick_way() -> None:
    reader = known()
    changed = _SAMPLE.sub(lambda m: f"{m[1]} {len(m[0])}.5", SHARED)
    assert is_quick(reader, changed)
    assert not is_quick(reader, changed + "new_one 1\n")
    assert is_quick(reader, SHARED + "new_one 2\n")


def test_another_nodes_page_is_learned_without_the_parser() -> None:
    reader = known()
    other = SHARED.replace("node-1", "node-two").replace("GPU-", "GPU-x")
    assert learned_quickly(reader, other)
    assert not is_quick(reader, other)
    assert is_quick(reader, other)
    told_alike(reader, other)
    for bad in (
        other + "# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n",
        other + "# HELP DCGM_FI_DEV_GPU_UTIL twice\nx 1\n",
        other.replace('"node-two"', '"node\\ntwo"'),
        other.replace('"node-two"', '"node\ntwo"', 1),
        other.replace('"node-two"', '"node-two', 1),
        "".join(sorted(other.splitlines(keepends=True))),
        other[:-1],
    ):
        told_alike(reader, bad)
        told_alike(known(other), bad)


def test_a_page_that_makes_up_names_does_not_fill_the_memory() -> None:
    chunks = Chunks(names_read())
    reader = PageReader("t", "a", chunks=chunks)
    for turn in range(30):
        page = "".join(series(f"made_up_{turn}_{n}") for n in range(1000))
        outcome(reader, page + SHARED)
    assert len(chunks._heads) <= 20_000
    told_alike(reader, SHARED)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_pages_are_known_again(name: str) -> None:
    page = (NODES / name / "expected.prom").read_text(encoding="utf-8")
    reader = known(page)
    assert is_quick(reader, page)
    told_alike(reader, page)


ODD = (
    *("0", "1", "-1", "1e3", "1E+3", "1.", ".5", "+7", "1e308", "NaN", "nan", "+Inf", "-inf", "Infinity"),
    *("1e999", "-1e999", "1_000", "0x10", "--1", "e", ".", "1e", "٣", "１", "", " ", "5 ", "5\t", "5\r", " 5", "5\x0b"),
    *("5 1700000000000", "5 5.5", "1 2 3", "5 # no", "5\x00", "\x00"),
)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize(
    "name", ["DCGM_FI_DEV_GPU_UTIL", "podgpu_exporter_snapshot_timestamp_seconds", "not_looked_at"]
)
def test_an_odd_value_is_told_alike(name: str, value: str) -> None:
    page = f"not_looked_at 1\n{SHARED}"
    odd = re.sub(rf"(?m)^({name}\b.*) \S+$", lambda m: f"{m[1]} {value}", page, count=1)
    assert odd != page or value == "1"
    reader = known(page)
    for again in (odd, odd, page):
        told_alike(reader, again)


_VALUES = st.sampled_from(ODD)


@given(st.lists(st.tuples(st.integers(0, 10_000), _VALUES), min_size=1, max_size=6), st.booleans())
def test_odd_values_are_told_alike(changes: list[tuple[int, str]], twice: bool) -> None:
    lines = SHARED.splitlines()
    samples = [n for n, line in enumerate(lines) if not line.startswith("#")]
    for place, value in changes:
        number = samples[place % len(samples)]
        lines[number] = f"{lines[number].rpartition(' ')[0]} {value}"
    page = "\n".join(lines) + "\n"
    reader = known()
    told_alike(reader, page)
    if twice:  # and the page that came in between is known now
        told_alike(reader, page)
        told_alike(reader, SHARED)


_EDITS = st.sampled_from(
    [
        "swap",
        "drop",
        "repeat",
        "label",
        "comment",
        "blank",
        "rename",
        "escape",
        "type",
        "help number",
        "no space",
        "cut",
    ]
)


@given(st.lists(st.tuples(_EDITS, st.integers(0, 10_000), st.integers(0, 10_000)), min_size=1, max_size=4))
def test_other_series_are_told_alike(edits: list[tuple[str, int, int]]) -> None:
    lines = SHARED.splitlines()
    for edit, one, other in edits:
        _edit(lines, edit, one % len(lines), other % len(lines))
    page = "\n".join(lines) + "\n"
    reader = known()
    told_alike(reader, page)
    told_alike(reader, page)
    told_alike(reader, SHARED)


def _edit(lines: list[str], edit: str, one: int, other: int) -> None:
    line = lines[one]
    if edit == "swap":
        lines[one], lines[other] = lines[other], line
    elif edit == "drop":
        lines[one] = ""
    elif edit == "repeat":
        lines.insert(other, line)
    elif edit == "label":
        lines[one] = line.replace('="', '="x', 1)
    elif edit == "comment":
        lines[one] = f"# {line}"
    elif edit == "blank":
        lines[one] = f" {line} "
    elif edit == "rename":
        lines[one] = f"x{line}"
    elif edit == "escape":
        lines[one] = line.replace('="', '="\\" \\n 5\\\\', 1)
    elif edit == "type":
        lines[one] = "# TYPE podgpu_device histogram"
    elif edit == "help number":
        lines[one] = f"# HELP some_{one} {other}"
    elif edit == "no space":
        lines[one] = line.replace("} ", "}", 1)
    elif edit == "cut":
        lines[one] = line[: other % (len(line) + 1)]


@given(st.text(max_size=200))
def test_garbage_is_told_alike(text: str) -> None:
    told_alike(known(), text)


def test_a_hole_cannot_be_forged() -> None:
    """A page with what stands for a number in its text could otherwise pass for another one."""
    gpu = series("DCGM_FI_DEV_GPU_UTIL", "7", **GPU)
    good, bad = f"# c\0X 7\n{gpu}", f"# c 5\nX\0{gpu}"
    told_alike(known(good), bad)
    told_alike(known(bad), good)


def test_timestamps_are_always_read_the_exact_way() -> None:
    gpu = series("DCGM_FI_DEV_GPU_UTIL", "7", **GPU)
    for page in (series("DCGM_FI_DEV_GPU_UTIL", "7 1000", **GPU), f"other 7 1000\n{gpu}"):
        reader = known(page)
        told_alike(reader, page.replace("1000", "2000"))
        told_alike(reader, page.replace("1000", "2.5"))


def test_families_that_are_not_in_one_group() -> None:
    other = GPU | {"UUID": "GPU-2", "gpu": "1"}
    page = (
        series("DCGM_FI_DEV_GPU_UTIL", "1", **GPU)
        + series("DCGM_FI_DEV_GPU_TEMP", "2", **GPU)
        + series("DCGM_FI_DEV_GPU_UTIL", "3", **other)
        + series("DCGM_FI_DEV_GPU_TEMP", "4", **other)
    )
    reader = known(page)
    changed = page.replace(" 1\n", " 10\n").replace(" 3\n", " 30\n").replace(" 4\n", " 40\n")
    assert is_quick(reader, changed)
    told_alike(reader, changed)
    node = reader.read(changed.encode(), 0.0, 0.0)
    assert [(d.utilization, d.temperature) for d in node.devices] == [(0.1, 2.0), (0.3, 40.0)]
