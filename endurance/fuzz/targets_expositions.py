"""Expositions of exporters and answers about nodes: whatever can be served to podgpu under a metrics URL."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from endurance.fuzz.mutate import Case, blobs, documents, either, texts
from endurance.fuzz.target import Target
from podgpu.cluster.prom.answer import parse_answer, parse_error
from podgpu.cluster.prom.owners import parse_pod_owners, parse_replica_set_owners, resolved
from podgpu.cluster.prom.series import SeriesMemory
from podgpu.cluster.reading import NodeReading
from podgpu.cluster.scraping.exposition import ExpositionReader
from podgpu.enrich.relabel import relabel
from podgpu.errors import SourceError
from podgpu.figures.from_exposition import view_of_exposition
from podgpu.figures.from_json import parse_view
from podgpu.figures.gpu_view import MOST_FIELDS, parse_details
from podgpu.gpu.exposition import parse_exposition
from podgpu.metrics.parse import ParsedFamily, parse_text
from podgpu.metrics.policy import Policy
from podgpu.metrics.text import encode_parsed
from podgpu.model import Assignment, Workload
from podgpu.top.api_answers import FULL, NO_DATA, parse_gpu_facts, parse_history

_FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures"


def _few_lines(path: Path, least: int = 2) -> list[str]:
    """Parts of a real exposition: small cases find more in the same time than whole expositions do."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return ["".join(lines[at : at + least * size]) for size in (1, 4) for at in range(0, min(len(lines), 120), 9)]


EXPOSITIONS = [
    *(part for path in sorted(_FIXTURES.glob("*/*.prom")) for part in _few_lines(path)),
    '# HELP x{a="b"} 1\n# TYPE x gauge\nx{a="b\\"c\\\\",} 1 1700000000000\n',
    ' # hello 5\n#\n# TYPE h histogram\nh_bucket{le="+Inf"} 3\nh_sum 1.5\nh_count 3\n',
    'podgpu_exporter_snapshot_timestamp_seconds 1.7e+09\npodgpu_allocation_info{gpu="0",UUID="GPU-a",pod="p"} 1\n',
    'podgpu_namespace_energy_joules_total{namespace="a",Hostname="n"} 5\n',
    'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",Hostname="n"} 5\nDCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b"} NaN\n',
]
_SMALL = [exposition for exposition in EXPOSITIONS if len(exposition) < 3000]
_WORDS = ('{gpu="0"}', ',a="b"', "} 1 2\n", " 1e5\n", "\n\n", "# EOF\n", 'le="', "_bucket", "podgpu_", "DCGM_FI_")
_MAKE_EXPOSITION = either(
    texts(_SMALL, _WORDS),
    texts([_SMALL[-1], _SMALL[-2], _SMALL[-4], _SMALL[-5]], _WORDS),
)


def _same(one: Sequence[ParsedFamily], other: Sequence[ParsedFamily]) -> bool:
    return repr(one) == repr(other)  # NaN is NaN here


def exposition(case: Case) -> object:
    """The quick way and the exact one say the same, and what is written again reads the same again."""
    assert isinstance(case, str)
    text = case.encode("utf-8", "replace").decode()
    found = parse_text(text)
    exact = parse_text(text + "# \x0bé\n")  # no exposition with such a line is read the quick way
    assert _same(found, exact), "the two ways through an exposition differ"
    names = [family.name for family in found]
    assert len(set(names)) == len(names), "a family twice"
    again = parse_text(encode_parsed(found).decode())
    untimed = [s._replace(timestamp=None) for family in found for s in family.samples]
    assert repr([s for family in again for s in family.samples]) == repr(untimed), "written again it reads otherwise"
    return found or None


def labels(case: Case) -> object:
    """Whatever stands between the braces: at most one series, and its labels come back as they were."""
    assert isinstance(case, str)
    line = case.encode("utf-8", "replace").decode().replace("\n", "")
    (family,) = parse_text(f"x{{{line}}} 1\n")
    (again,) = parse_text(encode_parsed([family]).decode())
    assert again.samples[0].labels == family.samples[0].labels, "written again the labels read otherwise"
    return family.samples[0].labels or None


def exporter_exposition(case: Case) -> object:
    """`telemetry exporter:` and `enrich`: devices each once; relabelled expositions can be read again."""
    exposition = parse_exposition(
        case.encode("utf-8", "replace") if isinstance(case, str) else case, "http://x/metrics"
    )
    keys = [device.key for device in exposition.devices]
    assert len(set(keys)) == len(keys), "a device twice"
    held = [Assignment(key, Workload("ns", "pod", "c"), "kubelet") for key in keys]
    parse_text(encode_parsed(relabel(exposition, held, Policy()).families).decode())
    return keys or None


def figures(case: Case) -> object:
    assert isinstance(case, str)
    view = view_of_exposition(parse_text(case.encode("utf-8", "replace").decode()))
    for device in view.devices:
        numbers = (device.utilization, device.power_watts, device.memory_used, device.energy_joules)
        assert all(n is None or math.isfinite(n) for n in numbers), "no number leaves as a figure"
    return view.devices or None


_BASES = [exposition.encode() for exposition in EXPOSITIONS if "UUID" in exposition]
_KNOWING = ExpositionReader("node", "node:9400")
"""Reads one exposition after the other, and may remember what it likes of them."""


def cluster_exposition(case: Case) -> object:
    """One who knows the expositions before it, and one who sees this exposition alone, read the same."""
    body = case.encode("utf-8", "replace") if isinstance(case, str) else case
    fresh = ExpositionReader("node", "node:9400")
    outcomes = [_reading(reader, body) for reader in (_KNOWING, _KNOWING, fresh)]
    assert repr(outcomes[0]) == repr(outcomes[2]), (
        "what was learned of other expositions changed the reading of this one"
    )
    assert repr(outcomes[1]) == repr(outcomes[2]), "the second time it is read otherwise"
    if isinstance(outcomes[2], SourceError):
        raise outcomes[2]
    return outcomes[2].devices or None


def _reading(reader: ExpositionReader, body: bytes) -> NodeReading | SourceError:
    try:
        return reader.read(body, 100.0, 1_700_000_000.0)
    except SourceError as error:
        return error


# Answers in JSON


def _vector(*metrics: dict[str, str]) -> object:
    result = [{"metric": metric, "value": [1700000000.5, "1.5"]} for metric in metrics]
    return {"status": "success", "data": {"resultType": "vector", "result": result}, "warnings": ["w"]}


_ANSWERS = (
    _vector({"__name__": "DCGM_FI_DEV_GPU_UTIL", "gpu": "0", "UUID": "GPU-a"}, {"a": "é"}),
    _vector({"namespace": "n", "pod": "p", "owner_kind": "ReplicaSet", "owner_name": "web-1"}),
    _vector({"exported_namespace": "n", "replicaset": "web-1", "owner_kind": "Deployment", "owner_name": "web"}),
    {"status": "success", "data": {"resultType": "scalar", "result": [1.0, "2"]}},
    {"status": "error", "errorType": "bad_data", "error": "parse\nerror"},
    {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "histogram": [1, {}]}]}},
)


def prometheus_answer(case: Case) -> object:
    assert isinstance(case, bytes)
    parse_error(case)
    vector = parse_answer(case, "http://prometheus")
    known = SeriesMemory().of("a question")
    assert vector == parse_answer(case, "http://prometheus", known), "cut or not, it says the same"
    assert vector == parse_answer(case, "http://prometheus", known), "known or not, it says the same"
    assert all(math.isfinite(sample.value) for sample in vector.samples), "no number leaves as a sample"
    "".join(value for sample in vector.samples for value in sample.labels.values()).encode()
    resolved(parse_pod_owners(vector.samples), parse_replica_set_owners(vector.samples))
    return vector.samples or None


_VIEW = {
    "api": "podgpu/v1",
    "taken_at": 1700000000.5,
    "notes": ["one"],
    "nodes": [
        {
            "name": "n",
            "old": True,
            "age_seconds": 3,
            "gpus": [
                {
                    "uuid": "GPU-a",
                    "index": 0,
                    "model": "H100",
                    "utilization_ratio": 0.5,
                    "memory_used_bytes": 5,
                    "holders": [{"namespace": "ns", "pod": "p", "share_ratio": 0.5, "energy_joules": 1.5}],
                    "instances": [{"id": "1", "profile": "1g.10gb", "power_watts": 3}],
                }
            ],
        }
    ],
}


def cluster_view(case: Case) -> object:
    assert isinstance(case, bytes)
    view = parse_view(case)
    for device in view.devices:
        assert device.utilization is None or math.isfinite(device.utilization)
        assert device.memory_used is None or isinstance(device.memory_used, int)
    return view.devices or None


_HISTORY = {
    "api": "podgpu/v1",
    "from": 1.5,
    "step_seconds": 15,
    "points": 4,
    "devices": {"GPU-a": "AGTI/w==", "b/7": ""},
}
_GPU_FACTS = {
    "api": "podgpu/v1",
    "gpu": {"uuid": "GPU-a"},
    "method": "samples",
    "fields": [{"name": "f", "help": "h", "unit": "W", "value": 1.5, "source": "nvml"}, {"name": "g", "value": "text"}],
    "xids": [{"xid": 79, "says": "s", "class": "hardware", "at": 2.5}],
    "sources": [{"source": "nvml", "ok": True}, {"source": "gpu0", "ok": False, "error": "e", "message": "m"}],
}


def server_history(case: Case) -> object:
    assert isinstance(case, bytes)
    history = parse_history(case)
    assert 0 < history.step < math.inf
    assert all(point <= FULL or point == NO_DATA for points in history.devices.values() for point in points)
    return history.devices or None


def gpu_facts(case: Case) -> object:
    assert isinstance(case, bytes)
    assert set(parse_details(case)) <= {"fields", "xids", "sources", "method"}
    facts = parse_gpu_facts(case)
    assert all(xid.at is None or math.isfinite(xid.at) for xid in facts.xids)
    return facts.fields or facts.xids or None


def gpu_details(case: Case) -> object:
    """What the cluster takes of an exporter's answer goes on to a browser: JSON, and no more than there can be."""
    assert isinstance(case, bytes)
    found = parse_details(case)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(found.get("fields", ())) <= MOST_FIELDS
    return found or None


EXPOSITION_TARGETS = (
    Target("exposition", _MAKE_EXPOSITION, exposition),
    Target("exposition-labels", texts(['a="b",c="d\\"\\n"', 'gpu="0",', ""], _WORDS), labels),
    Target("exporter-exposition", either(_MAKE_EXPOSITION, blobs(_BASES)), exporter_exposition),
    Target("figures-of-exposition", _MAKE_EXPOSITION, figures),
    Target("cluster-exposition", either(_MAKE_EXPOSITION, blobs(_BASES)), cluster_exposition),
    Target("prometheus-answer", documents(_ANSWERS), prometheus_answer),
    Target("cluster-view", documents([_VIEW]), cluster_view),
    Target("server-history", documents([_HISTORY]), server_history),
    Target("gpu-facts", documents([_GPU_FACTS]), gpu_facts),
    Target("gpu-details", documents([_GPU_FACTS]), gpu_details),
)
