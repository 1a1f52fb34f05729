"""Node names as metric names: valid, never shared, and the seed's own as it prints them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.pod_map import metric_name

VALID = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
NAMES = st.one_of(
    st.text(),
    st.text(alphabet="aA0-._:2ef"),
    st.from_regex(r"[a-z0-9]([-a-z0-9]{0,4}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,4}[a-z0-9])?){0,3}", fullmatch=True),
)


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("ti", "ti_info"),
        ("ti2", "ti2_info"),
        ("gpu-1.lab", "gpu_1:lab_info"),
        ("10.0.0.1", "_10:0:0:1_info"),
        ("10.0.0.1:9400", "_10::2e:0::2e:0::2e:1::3a:9400_info"),
        ("my_node", "my::5f:node_info"),
        ("Node", "Node_info"),
        ("0A", "_0A_info"),
        ("größe", "gr::f6:::df:e_info"),
        ("-a", "::2d:a_info"),
        ("a..b", "a::2e:::2e:b_info"),
        ("", "_info"),
    ],
)
def test_names(node: str, name: str) -> None:
    assert metric_name(node) == name


@given(NAMES)
def test_always_valid(node: str) -> None:
    assert VALID.fullmatch(metric_name(node))


def node_of(name: str) -> str:
    """The way back, which there can only be when no two nodes share a name."""
    body = name.removesuffix("_info")
    if re.fullmatch(r"_?[a-z0-9_:]*", body) and "::" not in body and body:
        return re.sub(r"^_", "", body).translate(str.maketrans("_:", "-."))
    return re.sub(r"::([0-9a-f]+):", lambda hexed: chr(int(hexed[1], 16)), re.sub(r"^_", "", body))


@given(NAMES)
def test_there_is_a_way_back(node: str) -> None:
    assert node_of(metric_name(node)) == node


@given(st.text(alphabet="aA0-._:2e", max_size=6), st.text(alphabet="aA0-._:2e", max_size=6))
def test_no_two_nodes_share_a_name(one: str, other: str) -> None:
    assert (metric_name(one) == metric_name(other)) == (one == other)
