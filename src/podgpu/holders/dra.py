"""Finds the GPUs held through ResourceClaims (DRA).

The kubelet reports the holders of each claim, ResourceSlices the GPU behind each device name. The API server and the
NVIDIA driver's checkpoint supply what neither has: UUIDs of MIG devices created for a claim, and `adminAccess`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from msgspec import Struct, field

from podgpu.errors import SourceError
from podgpu.files import ReadOnChange, decode_json
from podgpu.holders.device_ids import DeviceIndex, parse_device_id, sort_allocation
from podgpu.holders.kubelet import SOURCE
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import (
    NVIDIA_DRIVER,
    RESOURCE_GROUP,
    PoolSlice,
    SliceDevice,
    current_devices,
    find_resource_version,
)
from podgpu.kube.reflector import REFUSALS
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload

CHECKPOINT_NAME = f"plugins/{NVIDIA_DRIVER}/checkpoint.json"
"""Relative to the kubelet's root directory."""
_MAX_CHECKPOINT_BYTES = 16 * 1024 * 1024
_READ_CLAIMS_SECONDS = 2.0
_RETRY_SECONDS = 10.0
_RETRY_REFUSED_SECONDS = 60.0

Attributes = tuple[tuple[str, str], ...]
ClaimName = tuple[str, str]
"""Namespace and name."""
DeviceName = tuple[str, str]
"""Pool and name."""

_UUID_PATHS = (
    ("gpu", "info", "uuid"),
    ("mig", "info", "uuid"),
    ("mig", "created", "uuid"),
    ("mig", "concrete", "migUUID"),
)
"""Places of the UUID in the driver's checkpoint. A MIG device has had three so far."""

_log = logging.getLogger("podgpu")
_UUID = re.compile(r"(?<!MIG-)(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class SliceFeed(Protocol):
    """The ResourceSlices of this node, watched elsewhere."""

    def items(self) -> tuple[PoolSlice, ...]:
        """Returns the same tuple until something changes."""
        ...

    @property
    def synced(self) -> bool: ...


class DraClaims:
    """Maps the claims of a List answer to devices. Each of the three sources of claim details is optional."""

    def __init__(
        self,
        feed: SliceFeed | None,
        checkpoint: DriverCheckpoint | None = None,
        reader: ClaimReader | None = None,
    ) -> None:
        self._feed = feed
        self._checkpoint = checkpoint
        self._reader = reader
        self._slices: tuple[PoolSlice, ...] = ()
        self._pools: dict[str, dict[str, SliceDevice]] = {}
        self._cached: dict[DeviceName, SliceDevice] = {}
        """Devices of pools with held claims. A driver that stops removes its slices, and a kubelet that starts without
        the driver deletes them."""

    def held(self, response: Any, devices: Sequence[Device]) -> Allocation:
        prepared = PreparedClaims({}, {}) if self._checkpoint is None else self._checkpoint.read()
        is_synced = self._feed is not None and self._feed.synced
        if is_synced:
            self._update_pools()
        claimed = self._without_admin_access(list(parse_claims(response)), prepared, is_synced)
        self._update_cache(claimed)
        resolver = _ClaimResolver(claimed, self._pools, self._cached, devices, prepared.uuids, is_synced)
        held: dict[tuple[str, Workload], Attributes] = {}
        unmapped: set[Unmapped] = set()
        for claim in claimed:
            resolved = resolver.find(claim)
            if isinstance(resolved, str):
                unmapped.add(claim.unmapped(resolved))
                continue
            device, attributes = resolved
            key = device.key, claim.holder
            held[key] = min(attributes, held.get(key, attributes))
        assignments = (Assignment(*key, SOURCE, attributes=attributes) for key, attributes in held.items())
        return sort_allocation(assignments, unmapped)

    def _update_pools(self) -> None:
        slices = () if self._feed is None else self._feed.items()
        if slices is not self._slices:
            current = current_devices(entry for entry in slices if entry.driver == NVIDIA_DRIVER)
            self._pools = {pool: {device.name: device for device in devices} for (_, pool), devices in current.items()}
            self._slices = slices

    def _without_admin_access(
        self, claimed: list[ClaimedDevice], prepared: PreparedClaims, is_synced: bool
    ) -> list[ClaimedDevice]:
        """Removes devices claimed with adminAccess, such as by monitoring pods. They do not hold the device."""
        admin = dict(prepared.admin)
        unknown = {(claim.namespace, claim.claim) for claim in claimed} - admin.keys()
        if self._reader is not None and is_synced:  # before, no claim can be mapped
            admin |= self._reader.read(unknown)
        return [
            claim
            for claim in claimed
            if (claim.pool, claim.device) not in admin.get((claim.namespace, claim.claim), ())
        ]

    def _update_cache(self, claimed: Iterable[ClaimedDevice]) -> None:
        held = {(claim.pool, claim.device) for claim in claimed}
        pools = {pool for pool, _ in (*held, *self._cached)} & self._pools.keys()
        offered = {(pool, name): device for pool in pools for name, device in self._pools[pool].items()}
        kept = {name: device for name, device in self._cached.items() if name in held or name[0] not in self._pools}
        self._cached = kept | offered


# Claims in the kubelet's answer


class ClaimedDevice(NamedTuple):
    """A device of a claim, held by a container."""

    holder: Workload
    namespace: str
    claim: str
    driver: str = ""
    pool: str = ""
    device: str = ""
    cdi_name: str = ""
    """Used if pool and device are missing: kubelets of 1.27 to 1.30."""

    def unmapped(self, reason: str) -> Unmapped:
        text = self.cdi_name or f"{self.driver}/{self.pool}/{self.device}"
        return Unmapped(SOURCE, reason, text, f"claim {self.namespace}/{self.claim}", self.holder)


def parse_claims(response: Any) -> Iterator[ClaimedDevice]:
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Workload(pod.namespace, pod.name, container.name)
            for claim in container.dynamic_resources:
                for resource in claim.claim_resources:
                    claimed = ClaimedDevice(
                        *(holder, claim.claim_namespace, claim.claim_name),
                        *(resource.driver_name, resource.pool_name, resource.device_name),
                    )
                    if claimed.driver == NVIDIA_DRIVER and claimed.pool and claimed.device:
                        yield claimed
                    elif claimed.driver in ("", NVIDIA_DRIVER):
                        yield from _parse_cdi_names(claimed, [cdi.name for cdi in resource.cdi_devices])


def _parse_cdi_names(claimed: ClaimedDevice, names: Sequence[str]) -> Iterator[ClaimedDevice]:
    """Yields the names with a UUID, otherwise one name of a GPU. The kubelet repeats names of earlier devices."""
    chosen = [name for name in names if _UUID.search(name)]
    if not chosen:
        chosen = [name for name in names if _is_gpu_kind(name)][:1] or ([""] if claimed.driver else [])
    for name in chosen:
        yield claimed._replace(pool="", device="", cdi_name=name)


def _is_gpu_kind(cdi_name: str) -> bool:
    """Accepts `nvidia.com/gpu=0` and `k8s.gpu.nvidia.com/claim=…`, not `k8s.compute-domain.nvidia.com`."""
    kind = cdi_name.partition("=")[0]
    vendor = kind.partition("/")[0]
    return kind == "nvidia.com/gpu" or (vendor.endswith(".nvidia.com") and "gpu" in vendor.split("."))


class _ClaimResolver:
    """Finds the device of a claim, or the reason why there is none."""

    def __init__(
        self,
        claimed: Iterable[ClaimedDevice],
        pools: Mapping[str, Mapping[str, SliceDevice]],
        cached: Mapping[DeviceName, SliceDevice],
        devices: Sequence[Device],
        uuids: Mapping[DeviceName, str],
        is_synced: bool,
    ) -> None:
        self._pools = pools if is_synced else {}
        self._cached = cached
        self._uuids = uuids
        self._is_synced = is_synced
        self._index = DeviceIndex(devices)
        self._instances: dict[tuple[str, str], list[Device]] = defaultdict(list)
        """(parent, profile) -> GPU instances."""
        for device in devices:
            if device.is_instance:
                self._instances[device.uuid.lower(), device.profile].append(device)
        self._claimed_migs: dict[tuple[str, str], set[SliceDevice]] = defaultdict(set)
        """(parent, profile) -> claimed MIG devices without a published UUID."""
        for claim in claimed:
            offered = self._find_in_slices(claim)
            if isinstance(offered, SliceDevice) and not offered.uuid:
                self._claimed_migs[_layout(offered)].add(offered)

    def find(self, claim: ClaimedDevice) -> tuple[Device, Attributes] | str:
        if not claim.device:
            match = _UUID.search(claim.cdi_name)
            return "claim_without_device_name" if match is None else self._find_by_uuid(claim, match[0])
        offered = self._find_in_slices(claim)
        published = offered.uuid if isinstance(offered, SliceDevice) else ""
        uuid = published or self._uuids.get((claim.pool, claim.device), "")
        if uuid:
            return self._find_by_uuid(claim, uuid)
        return offered if isinstance(offered, str) else self._find_instance(claim, offered)

    def _find_in_slices(self, claim: ClaimedDevice) -> SliceDevice | str:
        name = claim.pool, claim.device
        offered = self._pools.get(claim.pool, {}).get(claim.device) or self._cached.get(name)
        if offered is not None:
            return offered
        if not self._is_synced:
            return "slices_not_synced"
        return "unknown_claim_device" if claim.pool in self._pools else "unknown_pool"

    def _find_instance(self, claim: ClaimedDevice, offered: SliceDevice) -> tuple[Device, Attributes] | str:
        """Finds the instance of a MIG device created for the claim, whose slice has no UUID.

        Unambiguous only if there is one matching instance and one matching claimed device.
        """
        if offered.type != "mig" or not offered.parent_uuid or not offered.profile:
            return "claim_device_without_uuid"
        instances = self._instances.get(_layout(offered), [])
        if not instances:
            return "unknown_device"
        if len(instances) > 1 or len(self._claimed_migs[_layout(offered)]) > 1:
            return "ambiguous_mig_device"
        (device,) = instances
        uuid = device.mig_uuids[0] if len(device.mig_uuids) == 1 else ""
        return device, _build_attributes(claim, uuid, offered.profile)

    def _find_by_uuid(self, claim: ClaimedDevice, uuid: str) -> tuple[Device, Attributes] | str:
        device_id = parse_device_id(uuid) if uuid.startswith(("GPU-", "MIG-")) else None
        devices = self._index.find(device_id) if device_id is not None else ()
        if not devices:
            return "unknown_device"
        device = devices[0]
        return device, _build_attributes(claim, uuid if device.is_instance else "", device.profile)


def _layout(offered: SliceDevice) -> tuple[str, str]:
    return offered.parent_uuid.lower(), offered.profile


def _build_attributes(claim: ClaimedDevice, mig_uuid: str, profile: str) -> Attributes:
    """Returns dcgm-exporter's labels in its order, without empty ones."""
    labels = (
        ("dra_claim_name", claim.claim),
        ("dra_claim_namespace", claim.namespace),
        ("dra_device_name", claim.device),
        ("dra_driver_name", claim.driver),
        ("dra_mig_device_uuid", mig_uuid),
        ("dra_mig_profile", profile),
        ("dra_pool_name", claim.pool),
    )
    return tuple((name, value) for name, value in labels if value)


# ResourceClaims


def admin_devices(claim: object) -> frozenset[DeviceName]:
    """Returns the devices that a ResourceClaim was given with adminAccess.

    Kubernetes 1.31 has adminAccess in the request only; later versions also have it in the result.
    """
    requests = _list_at(claim, "spec", "devices", "requests")
    admin_requests = {
        _at(request, "name")
        for request in requests
        if True in (_at(request, "adminAccess"), _at(request, "exactly", "adminAccess"))
    }
    return frozenset(
        (str(_at(result, "pool")), str(_at(result, "device")))
        for result in _list_at(claim, "status", "allocation", "devices", "results")
        if _at(result, "driver") == NVIDIA_DRIVER
        and (_at(result, "adminAccess") is True or _at(result, "request") in admin_requests)
    )


def _at(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list_at(value: object, *path: str) -> list[object]:
    entries = _at(value, *path)
    return entries if isinstance(entries, list) else []


class ClaimReader:
    """Reads each claim from the API server once, because an allocation does not change while it is held."""

    def __init__(self, config: ApiConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._cached: dict[ClaimName, frozenset[DeviceName]] = {}
        self._retry_at = float("-inf")
        self._logged = ""

    def read(self, held: Collection[ClaimName]) -> Mapping[ClaimName, frozenset[DeviceName]]:
        """Returns the adminAccess devices of the claims that could be read. Waits for at most 2 s."""
        self._cached = {name: devices for name, devices in self._cached.items() if name in held}
        new = sorted(set(held) - self._cached.keys())
        if new and self._clock() >= self._retry_at:
            try:
                asyncio.run(self._fetch(new))
                self._logged = ""
            except SourceError as error:
                # An API server that starts refuses everything for a moment, so only a second refusal counts.
                is_refused = error.reason in REFUSALS and error.reason == self._logged
                self._retry_at = self._clock() + (_RETRY_REFUSED_SECONDS if is_refused else _RETRY_SECONDS)
                if error.reason != self._logged:
                    self._logged = error.reason
                    _log.warning(
                        "cannot read resourceclaims, so claims with adminAccess count as holders: %s; will retry", error
                    )
        return self._cached

    async def _fetch(self, names: Collection[ClaimName]) -> None:
        try:
            async with asyncio.timeout(_READ_CLAIMS_SECONDS), ApiClient(self._config, verbs=("get",)) as client:
                version = await find_resource_version(client)  # not cached, because an upgrade can remove versions
                for namespace, name in names:
                    self._cached[namespace, name] = admin_devices(await _get_claim(client, version, namespace, name))
        except TimeoutError as error:
            raise SourceError("timeout", f"no answer within {_READ_CLAIMS_SECONDS:g} s") from error


async def _get_claim(client: ApiClient, version: str, namespace: str, name: str) -> Mapping[str, Any]:
    parts = (RESOURCE_GROUP, version, "namespaces", quote(namespace, ""), "resourceclaims", quote(name, ""))
    try:
        return await client.get("/".join(parts))
    except SourceError as error:
        if error.reason != "not_found":  # a deleted claim, which the kubelet lists for a moment longer
            raise
        return {}


# The driver's checkpoint


@dataclass(frozen=True, slots=True)
class PreparedClaims:
    """The claims that the driver has prepared on this node."""

    uuids: Mapping[DeviceName, str]
    """Current UUIDs of GPUs and MIG devices."""
    admin: Mapping[ClaimName, frozenset[DeviceName]]
    """Devices of each claim that were allocated with adminAccess."""


class _CheckpointVersion(Struct):
    claims: dict[str, dict[str, object]] | None = field(name="preparedClaims", default=None)


class _CheckpointFile(Struct):
    v1: _CheckpointVersion | None = None
    v2: _CheckpointVersion | None = None


class DriverCheckpoint:
    """Reads the driver's checkpoint. Keeps the last content while the file is invalid."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = ReadOnChange(parse_driver_checkpoint, _MAX_CHECKPOINT_BYTES)
        self._last = PreparedClaims({}, {})
        self._logged = ""

    def read(self) -> PreparedClaims:
        try:
            self._last, self._logged = self._file.read(self.path), ""
        except SourceError as error:
            if error.reason == "file_missing":
                self._last = PreparedClaims({}, {})  # not mounted, or another driver
            elif error.reason != self._logged:
                self._logged = error.reason
                _log.warning("checkpoint of the DRA driver: %s; keeping the last content", error)
        return self._last


def parse_driver_checkpoint(content: bytes, path: str = "the driver's checkpoint") -> PreparedClaims:
    """Version 2 has the names of the claims; version 1 has no states."""
    file = decode_json(content, path, _CheckpointFile)
    version = file.v2 or file.v1 or _CheckpointVersion()
    uuids: dict[DeviceName, str] = {}
    admin: dict[ClaimName, frozenset[DeviceName]] = {}
    for claim in (version.claims or {}).values():
        if _at(claim, "checkpointState") not in ("PrepareCompleted", "", None):
            continue
        for group in _list_at(claim, "preparedDevices"):
            for device in _list_at(group, "devices"):
                for path_to_uuid in _UUID_PATHS:
                    uuid, reference = _at(device, *path_to_uuid), _at(device, path_to_uuid[0], "device")
                    if uuid:
                        uuids[str(_at(reference, "PoolName")), str(_at(reference, "DeviceName"))] = str(uuid)
        name = _at(claim, "namespace"), _at(claim, "name")
        if all(name):
            admin[str(name[0]), str(name[1])] = admin_devices(claim)
    return PreparedClaims(uuids, admin)
