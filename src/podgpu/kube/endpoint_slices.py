"""This module reads from EndpointSlices where the pods behind a Service can be reached. Pure: objects in, records
out."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, NamedTuple

from podgpu.errors import few_of
from podgpu.json_shape import list_in, mapping_in, text_in

GROUP_PATH = "/apis/discovery.k8s.io/v1"
ANY_PORT = "metrics"
"""The port's name where nobody says another: a Service with only one port need not have named it so."""
_HTTPS = "https"


class SlicePort(NamedTuple):
    name: str
    number: int
    is_https: bool


class EndpointRecord(NamedTuple):
    address: str
    uid: str
    """Of what is behind the address, a pod nearly always; empty: nobody says."""
    name: str
    node: str


@dataclass(frozen=True, slots=True)
class EndpointSliceRecord:
    namespace: str
    service: str
    ports: tuple[SlicePort, ...]
    endpoints: tuple[EndpointRecord, ...]
    """Ready or not: an exporter that is sick, or is being replaced, is still asked."""


def slices_path(namespace: str = "") -> str:
    return f"{GROUP_PATH}/namespaces/{namespace}/endpointslices" if namespace else f"{GROUP_PATH}/endpointslices"


def parse_endpoint_slice(body: Mapping[str, Any]) -> EndpointSliceRecord | None:
    """What can be read of an EndpointSlice; None: it is none. Never raises."""
    metadata = mapping_in(body.get("metadata"))
    name = text_in(metadata.get("name"))
    if not name:
        return None
    service = text_in(mapping_in(metadata.get("labels")).get("kubernetes.io/service-name"))
    endpoints = (_endpoint(mapping_in(endpoint)) for endpoint in list_in(body.get("endpoints")))
    ports = (_port(mapping_in(port)) for port in list_in(body.get("ports")))
    return EndpointSliceRecord(
        intern(text_in(metadata.get("namespace"))),
        service or name,
        tuple(port for port in ports if port is not None),
        tuple(endpoint for endpoint in endpoints if endpoint is not None),
    )


def _endpoint(body: Mapping[str, Any]) -> EndpointRecord | None:
    """All addresses of an endpoint are the same to whoever asks."""
    address = next((text for text in map(text_in, list_in(body.get("addresses"))) if _is_address(text)), "")
    target = mapping_in(body.get("targetRef"))
    if not address:
        return None
    return EndpointRecord(
        address, text_in(target.get("uid")), text_in(target.get("name")), text_in(body.get("nodeName"))
    )


def _is_address(text: str) -> bool:
    """An IP address, or a name: nothing that would be another part of a URL."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(text) and text.isascii() and all(c.isalnum() or c in "-." for c in text)
    return "%" not in text


def _port(body: Mapping[str, Any]) -> SlicePort | None:
    number = body.get("port")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 65536:
        return None
    if body.get("protocol") not in (None, "TCP"):
        return None
    name = text_in(body.get("name"))
    is_https = text_in(body.get("appProtocol")).lower() == _HTTPS or _HTTPS in name.lower()
    return SlicePort(intern(name), number, is_https)


# Where to ask


class Found(NamedTuple):
    urls: tuple[str, ...]
    problems: tuple[str, ...]
    """Services whose port is not clear, in words."""


def metrics_urls(slices: Iterable[EndpointSliceRecord], port: str = ANY_PORT, *, https: bool = False) -> Found:
    """One URL per pod, in an order that does not depend on that of the slices. `port`: a name or a number."""
    urls: dict[str, str] = {}
    problems: dict[str, None] = {}
    # IPv4 before IPv6: a pod with both is behind two slices, and is asked once.
    places = [(_family(e.address), e.address, record, e) for record in slices for e in record.endpoints]
    for _, address, record, endpoint in sorted(places, key=lambda place: (place[0], place[1], place[2].service)):
        chosen = _choose(record.ports, port)
        if chosen is None:
            problems[_unclear(record, port)] = None
            continue
        host = f"[{address}]" if ":" in address else address
        scheme = _HTTPS if https or chosen.is_https else "http"
        url = f"{scheme}://{host}:{chosen.number}/metrics"
        urls.setdefault(endpoint.uid or url, url)
    return Found(tuple(dict.fromkeys(urls.values())), tuple(problems))


def _family(address: str) -> int:
    return 1 if ":" in address else 0


def _choose(ports: tuple[SlicePort, ...], wanted: str) -> SlicePort | None:
    if wanted.isdecimal():
        listed = next((port for port in ports if port.number == int(wanted)), None)
        return listed or SlicePort("", int(wanted), is_https=False)
    named = next((port for port in ports if port.name == wanted), None)
    if named is None and wanted == ANY_PORT and len(ports) == 1:
        return ports[0]
    return named


def _unclear(record: EndpointSliceRecord, wanted: str) -> str:
    there = few_of(f"{port.name or 'unnamed'} ({port.number})" for port in record.ports)
    return (
        f"the Service {record.namespace}/{record.service} has no port {wanted!r}; it has {there}: "
        "name one with --discover-port"
    )
