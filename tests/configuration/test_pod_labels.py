"""Pod labels as Prometheus labels: the allow-list, valid names, no collisions."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.agent.node_document import from_snapshot
from podgpu.configuration.bounded_pattern import BoundedPattern
from podgpu.configuration.pod_labels import LabelFilter, label_name
from podgpu.errors import UsageError
from podgpu.kube.objects import PodRecord
from podgpu.metrics.counters import parse_counters
from podgpu.metrics.render import Policy, render_node
from podgpu.metrics.text import encode
from podgpu.model import Assignment, Device, Reading, Snapshot, Workload

KEYS = st.one_of(
    st.sampled_from(
        ["gpu", "UUID", "device", "pod", "namespace", "container", "err_code", "modelName", "Hostname", "xid"]
    ),
    st.from_regex(r"\A[a-z0-9./-]{1,20}\Z"),
)


def test_all_keys_pass_without_a_list_and_only_matching_ones_with_one() -> None:
    record = PodRecord("ns", "p", "u", labels=(("app", "a"), ("team.example.com/owner", "ml"), ("tier", "x")))
    assert dict(LabelFilter().of([record])["ns", "p"]) == {"app": "a", "team_example_com_owner": "ml", "tier": "x"}
    assert dict(LabelFilter("^app$, owner").of([record])["ns", "p"]) == {"app": "a", "team_example_com_owner": "ml"}


def test_a_bad_pattern_is_refused() -> None:
    with pytest.raises(UsageError, match="allowlist-regex"):
        LabelFilter("(")


@pytest.mark.fault(
    "a tenant gives a pod a label that the operator's pattern of labels, (a+)+$ for one, could look at for ever",
    "it is looked at in the time Go's patterns take; patterns that cannot be are refused at the start",
)
@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)+$", "(.*)*x", ".*a.*a.*a.*a.*a.*x", "(a?){60}a{60}$", "(a*)*b|(a*)*c"]
)
def test_no_label_is_looked_at_for_long(pattern: str) -> None:
    began = time.thread_time()
    assert not LabelFilter(pattern).allows("a" * 300 + "!")
    assert time.thread_time() - began < 5.0


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)b",
        "(?<!a)b",
        r"(a)\1",
        "a*+b",
        "a{1000}",
        "((a{50}){50}){50}",
        "(" * 5000,
        "(?:){999999999}",
        "a{99999999999999999999}",
    ],
)
def test_what_cannot_be_bounded_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="allowlist-regex"):
        LabelFilter(pattern)


_ATOMS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\.",
        "[ab]",
        "[^a]",
        "[a-c/]",
        r"\w",
        r"\d",
        r"\W",
        "^",
        "$",
        r"\b",
        r"\B",
        "(?i:A)",
        "(?i:[A-B])",
        "[^\\d]",
        "",
    ]
)
_PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "{2,}"])).map(
            lambda two: f"({two[0]}){two[1]}"
        ),
    ),
    max_leaves=8,
)


@given(_PATTERNS, st.text("abcA1./- _", min_size=1, max_size=10))
def test_a_pattern_means_what_it_means_to_python(pattern: str, text: str) -> None:
    assert BoundedPattern(pattern).is_in(text) is (re.search(pattern, text) is not None)


@given(st.text(min_size=1))
def test_names_are_always_valid(key: str) -> None:
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label_name(key))
    assert not label_name(key).startswith("__")


@given(st.dictionaries(KEYS, st.text(st.characters(blacklist_categories=("Cs",)), max_size=8), max_size=8))
def test_a_pod_label_never_collides_with_a_built_in(labels: dict[str, str]) -> None:
    counters = parse_counters(
        "DCGM_FI_DEV_GPU_TEMP,gauge,t\nDCGM_FI_DEV_XID_ERRORS,gauge,x\nDCGM_FI_DRIVER_VERSION,label,d\n", "t"
    )
    device = Device(0, "GPU-1", "0000:1", "H100")
    record = PodRecord("ns", "p", "u", labels=tuple(labels.items()))
    snapshot = Snapshot(
        1.0,
        (device,),
        (Reading(device, {150: 40, 1: "580"}),),
        (Assignment("GPU-1", Workload("ns", "p", "c", "u"), "kubelet"),),
        pod_labels=LabelFilter().of([record]),
    )
    families = render_node(from_snapshot(snapshot), Policy(counters, "h", pod_uid=True))
    for family in families:
        for sample in family.samples:
            names = [name for name, _ in sample.labels.pairs]
            assert len(names) == len(set(names)), names
    assert b'namespace="ns",pod="p",pod_uid="u"' in encode(families)
    (temperature,) = next(f.samples for f in families if f.name == "DCGM_FI_DEV_GPU_TEMP")
    values = [value for _, value in temperature.labels.pairs]
    assert all(value in values for value in dict(LabelFilter().of([record])["ns", "p"]).values()), "none is lost"
