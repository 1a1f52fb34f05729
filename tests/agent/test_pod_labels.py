"""Pod labels as Prometheus labels: the allow-list, valid names, no collisions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.kube.objects import PodRecord
from podgpu.metrics.counters import parse_counters
from podgpu.metrics.dcgm import render_dcgm
from podgpu.metrics.encode import encode
from podgpu.metrics.labels import Policy
from podgpu.metrics.render import render_own
from podgpu.model import Assignment, Device, Workload
from podgpu.node.holders.api import LabelFilter, label_name
from tests.agent.documents import make_state

KEYS = st.one_of(
    st.sampled_from(
        [
            "gpu",
            "UUID",
            "device",
            "pod",
            "namespace",
            "container",
            "err_code",
            "modelName",
            "Hostname",
            "xid",
        ]
    ),
    st.from_regex(r"\A[a-z0-9./-]{1,20}\Z"),
)


def test_all_keys_pass_without_a_list_and_only_matching_ones_with_one() -> None:
    record = PodRecord(
        "ns", "p", "u", labels=(("app", "a"), ("team.example.com/owner", "ml"), ("tier", "x"))
    )
    assert dict(LabelFilter().select([record])["ns", "p"]) == {
        "app": "a",
        "team_example_com_owner": "ml",
        "tier": "x",
    }
    assert dict(LabelFilter("^app$, owner").select([record])["ns", "p"]) == {
        "app": "a",
        "team_example_com_owner": "ml",
    }


KEYS_OF_A_POD = ("app", "Tier", "app.kubernetes.io/name", "x{y}", "7")


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("^[[:alpha:]]+$", {"app", "Tier"}),
        (r"^\pL+\z", {"app", "Tier"}),
        (r"^\p{Lu}", {"Tier"}),
        (r"\Qs.io/\E", {"app.kubernetes.io/name"}),
        ("^t(?i)IER$|^aPP$", {"app"}),
        (r"^\d$", {"7"}),
        ("x{", {"x{y}"}),
        ("^(?<first>a)pp$", {"app"}),
    ],
)
def test_patterns_have_the_syntax_of_go(pattern: str, selected: set[str]) -> None:
    """Python's `re` rejects most of these, or reads them in another way."""
    record = PodRecord("ns", "p", "u", labels=tuple((key, "") for key in KEYS_OF_A_POD))
    expected = {label_name(key) for key in selected}
    assert set(dict(LabelFilter(pattern).select([record])["ns", "p"])) == expected


def test_a_pattern_takes_linear_time() -> None:
    """Users of the cluster choose the keys of labels."""
    record = PodRecord("ns", "p", "u", labels=(("a" * 63 + "/" + "a" * 63 + "!", ""),))
    assert LabelFilter("^(a+)+$,^(/|a+)+$").select([record])["ns", "p"] == ()


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", r"missing \): \("),
        ("app,(?=x)", r"regex '\(\?=x\)'.*invalid perl operator"),
        (r"(a)\1", "invalid escape sequence"),
        (r"app\Z", "invalid escape sequence"),
        ("a++", "bad repetition operator"),
        ("a{1001}", "invalid repetition size"),
    ],
)
def test_a_bad_pattern_is_refused(
    pattern: str, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        LabelFilter(pattern)
    assert "--kubernetes-pod-label-allowlist-regex" in str(caught.value)
    assert "Go's syntax" in str(caught.value)
    assert capfd.readouterr().err == ""


@given(st.text(min_size=1))
def test_names_are_always_valid(key: str) -> None:
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label_name(key))
    assert not label_name(key).startswith("__")


@given(
    st.dictionaries(KEYS, st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8)
)
def test_a_pod_label_never_collides_with_a_built_in(labels: dict[str, str]) -> None:
    counters = parse_counters(
        "DCGM_FI_DEV_GPU_TEMP,gauge,t\nDCGM_FI_DEV_XID_ERRORS,gauge,x\nDCGM_FI_DRIVER_VERSION,label,d\n",
        "t",
    )
    device = Device(0, "GPU-1", "0000:1", "H100")
    record = PodRecord("ns", "p", "u", labels=tuple(labels.items()))
    state = make_state(
        device,
        {150: 40, 1: "580"},
        [Assignment("GPU-1", Workload("ns", "p", "c", "u"), "kubelet")],
        pod_labels=LabelFilter().select([record]),
    )
    policy = Policy(counters, "h", pod_uid=True)
    families = [*render_dcgm(state, policy), *render_own(state, policy)]
    for family in families:
        for sample in family.samples:
            names = [name for name, _ in sample.labels.pairs]
            assert len(names) == len(set(names)), names
    assert b'namespace="ns",pod="p",pod_uid="u"' in encode(families)
    (temperature,) = next(f.samples for f in families if f.name == "DCGM_FI_DEV_GPU_TEMP")
    values = [value for _, value in temperature.labels.pairs]
    assert all(
        value in values for value in dict(LabelFilter().select([record])["ns", "p"]).values()
    ), "no value lost"
