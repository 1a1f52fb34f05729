"""This module reads what DRA drivers publish about their devices: it takes ResourceSlices of every API version apart.

Pure, but for `find_version` and `find_slices_path`, which ask the server what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from podgpu.errors import SourceError
from podgpu.json_shape import integer_in, list_in, mapping_in, text_in

if TYPE_CHECKING:
    from podgpu.kube.client import ApiClient

NVIDIA_DRIVER = "gpu.nvidia.com"
GROUP_PATH = "/apis/resource.k8s.io"

VERSIONS = ("v1", "v1beta2", "v1beta1", "v1alpha3")
"""Newest first: Kubernetes 1.34, 1.33, 1.32 and 1.31. What 1.30 and older have knows no device names."""


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """One device a driver offers. What it does not say is empty or None."""

    driver: str
    pool: str
    name: str
    type: str = ""
    """`gpu`, `mig`, or `vfio` for a GPU that is lent to virtual machines."""
    uuid: str = ""
    """Empty for a MIG device that the driver makes only when it is claimed (its feature DynamicMIG)."""
    parent_uuid: str = ""
    profile: str = ""
    minor: int | None = None


@dataclass(frozen=True, slots=True)
class PoolSlice:
    """One ResourceSlice: a part of one generation of a pool. It may be the part without devices."""

    driver: str
    pool: str
    generation: int
    devices: tuple[SliceDevice, ...] = ()


def slices_path(version: str) -> str:
    return f"{GROUP_PATH}/{version}/resourceslices"


async def find_slices_path(client: ApiClient) -> str:
    """Where this server has its slices. Asked again before each list: servers come late, and are replaced by others."""
    return slices_path(await find_version(client))


async def find_version(client: ApiClient) -> str:
    """Which version of DRA this server has. Raises SourceError (`not_found`) where it has none."""
    try:
        version = choose_version(await client.ask(GROUP_PATH))
    except SourceError as error:
        if error.reason == "not_found":
            raise _no_slices("no such group") from error
        if error.reason != "forbidden":
            raise
        version = VERSIONS[0]  # who may not ask what there is may still be let at the slices
    if version is None:
        raise _no_slices("no version that podgpu knows")
    return version


def _no_slices(what: str) -> SourceError:
    return SourceError(
        "not_found",
        f"the API server has {what} at {GROUP_PATH}: DRA begins with Kubernetes 1.31, and before 1.34 it must be turned"
        " on there; podgpu keeps asking",
    )


def slices_params(node: str = "", driver: str = NVIDIA_DRIVER) -> dict[str, str]:
    """Only this driver's slices, and only those of one node where its name is known."""
    selector = f"spec.driver={driver}"
    return {"fieldSelector": f"{selector},spec.nodeName={node}" if node else selector}


def choose_version(group: Mapping[str, Any]) -> str | None:
    """The newest version we can read that the server has, from its answer at `GROUP_PATH`; None: it has none."""
    offered = {text_in(mapping_in(version).get("version")) for version in list_in(group.get("versions"))}
    offered.add(text_in(mapping_in(group.get("preferredVersion")).get("version")))
    return next((version for version in VERSIONS if version in offered), None)


def parse_slice(obj: Mapping[str, Any], driver: str = NVIDIA_DRIVER) -> PoolSlice | None:
    """What can be read of a ResourceSlice; None for another driver's, or when it names no pool. Never raises."""
    spec = mapping_in(obj.get("spec"))
    pool = mapping_in(spec.get("pool"))
    name = text_in(pool.get("name"))
    if spec.get("driver") != driver or not name:
        return None
    devices = (_parse_device(mapping_in(device), driver, name) for device in list_in(spec.get("devices")))
    return PoolSlice(
        driver, name, integer_in(pool.get("generation")) or 0, tuple(device for device in devices if device is not None)
    )


def _parse_device(device: Mapping[str, Any], driver: str, pool: str) -> SliceDevice | None:
    name = text_in(device.get("name"))
    if not name:
        return None
    # v1beta1 and v1alpha3 have it one level down. The objects of a list do not say their version.
    body = mapping_in(device.get("basic")) or device
    attributes = mapping_in(body.get("attributes"))

    def text(attribute: str) -> str:
        return text_in(_value(attributes, driver, attribute, "string"))

    minor = integer_in(_value(attributes, driver, "minor", "int"))
    return SliceDevice(driver, pool, name, text("type"), text("uuid"), text("parentUUID"), text("profile"), minor)


def _value(attributes: Mapping[str, Any], driver: str, name: str, kind: str) -> object:
    """An attribute without a domain is in its driver's: `uuid` and `gpu.nvidia.com/uuid` are one."""
    found = attributes[name] if name in attributes else attributes.get(f"{driver}/{name}")
    return mapping_in(found).get(kind)


def current_devices(slices: Iterable[PoolSlice]) -> dict[tuple[str, str], tuple[SliceDevice, ...]]:
    """(driver, pool) -> devices of its newest generation; what an older one said of a name may be wrong by now.

    A pool that is being written is known in part: what is there is used.
    """
    newest: dict[tuple[str, str], list[PoolSlice]] = {}
    for part in slices:
        known = newest.setdefault((part.driver, part.pool), [])
        if known and part.generation > known[0].generation:
            known.clear()
        if not known or part.generation == known[0].generation:
            known.append(part)
    return {pool: tuple(device for part in parts for device in part.devices) for pool, parts in newest.items()}
