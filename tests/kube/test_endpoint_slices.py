"""EndpointSlices taken apart, and one URL per pod made of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.kube.objects import (
    EndpointRecord,
    EndpointSliceRecord,
    SlicePort,
    metrics_urls,
    parse_endpoint_slice,
)


def endpoint(address: str, uid: str = "", ready: bool | None = True, **more: Any) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}} if uid else {}
    return {"addresses": [address], "conditions": {"ready": ready}, "nodeName": "node-a"} | target | more


def slice_of(*endpoints: dict[str, Any], ports: Any = None, name: str = "s-1", **more: Any) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": "podgpu"}
    listed = [{"name": "metrics", "port": 9400, "protocol": "TCP"}] if ports is None else ports
    metadata = {"name": name, "namespace": "monitoring", "labels": labels}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": list(endpoints), "ports": listed} | more


def urls(*slices: dict[str, Any], port: str = "metrics", https: bool = False) -> tuple[str, ...]:
    return metrics_urls(map(parse_endpoint_slice, slices), port, https=https).urls


def test_a_slice() -> None:
    assert parse_endpoint_slice(slice_of(endpoint("10.0.0.1", "u1"))) == EndpointSliceRecord(
        "monitoring",
        "podgpu",
        (SlicePort("metrics", 9400, False),),
        (EndpointRecord("10.0.0.1", "u1", "pod-u1", "node-a"),),
    )


def test_endpoints_are_asked_ready_or_not() -> None:
    body = slice_of(
        endpoint("10.0.0.1", "a"),
        endpoint("10.0.0.2", "b", ready=False),
        endpoint("10.0.0.3", "c", ready=None),
        {"addresses": ["10.0.0.4"]},
    )
    assert urls(body) == tuple(f"http://10.0.0.{n}:9400/metrics" for n in (1, 2, 3, 4))


def test_ipv6_in_brackets() -> None:
    assert urls(slice_of(endpoint("fd00::7", "a"), addressType="IPv6")) == ("http://[fd00::7]:9400/metrics",)


def test_a_pod_of_both_families_and_two_services_is_asked_once() -> None:
    four = slice_of(endpoint("10.0.0.1", "u1"), endpoint("10.0.0.2", "u2"), name="a")
    six = slice_of(endpoint("fd00::1", "u1"), endpoint("fd00::3", "u3"), name="b", addressType="IPv6")
    headless = slice_of(endpoint("10.0.0.2", "u2"), name="c")
    expected = ("http://10.0.0.1:9400/metrics", "http://10.0.0.2:9400/metrics", "http://[fd00::3]:9400/metrics")
    assert urls(four, six, headless) == expected
    assert urls(headless, six, four) == expected


def test_endpoints_that_are_no_pods_go_by_their_address() -> None:
    assert len(urls(slice_of(endpoint("10.0.0.1"), endpoint("10.0.0.1"), endpoint("10.0.0.2")))) == 2


METRICS = {"name": "metrics", "port": 9400}
WEB = {"name": "web", "port": 8080}


@pytest.mark.parametrize(
    ("ports", "wanted", "chosen"),
    [
        ([METRICS, WEB], "metrics", 9400),
        ([METRICS, WEB], "web", 8080),
        ([WEB], "metrics", 8080),
        ([{"port": 8080}], "metrics", 8080),
        ([{"name": "", "port": 8080}], "metrics", 8080),
        ([METRICS, WEB], "9999", 9999),
        ([], "9999", 9999),
        ([METRICS | {"protocol": "UDP"}, WEB], "metrics", 8080),
    ],
)
def test_the_port(ports: list[dict[str, Any]], wanted: str, chosen: int) -> None:
    assert urls(slice_of(endpoint("h"), ports=ports), port=wanted) == (f"http://h:{chosen}/metrics",)


@pytest.mark.parametrize(
    ("ports", "wanted"),
    [([WEB, {"name": "x", "port": 1}], "metrics"), ([WEB], "http"), ([], "metrics"), ([METRICS], "x")],
)
def test_a_port_that_is_not_clear_is_told(ports: list[dict[str, Any]], wanted: str) -> None:
    record = parse_endpoint_slice(slice_of(endpoint("a"), endpoint("b"), ports=ports))
    found = metrics_urls([record, record], wanted)
    assert found.urls == ()
    (problem,) = found.problems
    assert "monitoring/podgpu" in problem
    assert repr(wanted) in problem
    assert "--discover-port" in problem


@pytest.mark.parametrize(
    ("port", "https", "scheme"),
    [
        ({"name": "https-metrics", "port": 1}, False, "https"),
        ({"name": "metrics", "port": 1, "appProtocol": "HTTPS"}, False, "https"),
        ({"name": "metrics", "port": 1, "appProtocol": "http"}, False, "http"),
        ({"name": "metrics", "port": 1}, True, "https"),
    ],
)
def test_https(port: dict[str, Any], https: bool, scheme: str) -> None:
    assert urls(slice_of(endpoint("h"), ports=[port]), https=https) == (f"{scheme}://h:1/metrics",)


@pytest.mark.parametrize("address", ["", "a/b", "a@b", "a:80", "a b", "a?x", "a#x", "fe80::1%eth0", "ä"])
def test_an_address_cannot_be_more_than_one(address: Any) -> None:
    assert urls(slice_of(endpoint(address))) == ()


@given(
    st.lists(st.tuples(st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1"]), st.sampled_from(["", "a", "b"]))),
    st.randoms(),
)
def test_the_order_does_not_matter(pairs: list[tuple[str, str]], chance: random.Random) -> None:
    slices = [slice_of(endpoint(address, uid), name=f"s{n}") for n, (address, uid) in enumerate(pairs)]
    found = urls(*slices)
    chance.shuffle(slices)
    assert urls(*slices) == found
    assert len(set(found)) == len(found)
