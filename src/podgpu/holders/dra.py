"""Finds the GPUs held through ResourceClaims (DRA).

The kubelet reports the holders of each claim. ResourceSlices map device names to GPUs. The API server and the NVIDIA
driver's checkpoint supply the rest: UUIDs of MIG devices created for a claim, and `adminAccess`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from msgspec import Struct, field

from podgpu.decode import decode_json
from podgpu.errors import SourceError
from podgpu.files import ReadOnChange
from podgpu.holders.device_ids import DeviceIndex, parse_device_id, sort_allocation
from podgpu.holders.kubelet import SOURCE
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import NVIDIA_DRIVER, RESOURCE_GROUP, PoolSlice, current_devices, find_resource_version
from podgpu.kube.reflector import REFUSALS, Store
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload

DRIVER_CHECKPOINT = f"plugins/{NVIDIA_DRIVER}/checkpoint.json"
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
"""Places of the UUID in the driver's checkpoint. For MIG devices it differs between driver versions."""

_log = logging.getLogger("podgpu")


class DraClaims:
    """Maps the claims of a List answer to devices. Slices, checkpoint and reader are each optional."""

    def __init__(
        self,
        slices: Store[PoolSlice] | None,
        checkpoint: DriverCheckpoint | None = None,
        reader: ClaimReader | None = None,
    ) -> None:
        self._slices = slices
        self._checkpoint = checkpoint
        self._reader = reader
        self._pools: frozenset[str] = frozenset()
        self._uuids: dict[DeviceName, str] = {}
        """Includes devices of removed pools, and held devices that were removed from a pool. Slices
        disappear when the driver stops, or when the kubelet starts before the driver."""

    def held(self, response: Any, devices: Sequence[Device]) -> Allocation:
        prepared = PreparedClaims({}, {}) if self._checkpoint is None else self._checkpoint.read()
        is_synced = self._slices is not None and self._slices.synced
        claimed = self._without_admin_access(list(parse_claims(response)), prepared, is_synced)
        if self._slices is not None and is_synced:
            self._update_devices(self._slices.items(), claimed)
        index = DeviceIndex(devices)
        held: dict[tuple[str, Workload], Attributes] = {}
        unmapped: set[Unmapped] = set()
        for claim in claimed:
            offered = self._uuids.get((claim.pool, claim.device))
            uuid = offered or prepared.uuids.get((claim.pool, claim.device), "")
            device_id = parse_device_id(uuid) if uuid.startswith(("GPU-", "MIG-")) else None
            device = next(iter(index.find(device_id)), None) if device_id else None
            if device is None:
                unmapped.add(claim.unmapped("unknown_device" if uuid else self._explain(claim, offered, is_synced)))
                continue
            attributes = claim.build_attributes(uuid if device.is_instance else "", device.profile)
            key = device.key, claim.holder
            held[key] = min(attributes, held.get(key, attributes))
        assignments = (Assignment(*key, SOURCE, attributes=attributes) for key, attributes in held.items())
        return sort_allocation(assignments, unmapped)

    def _update_devices(self, slices: tuple[PoolSlice, ...], claimed: Iterable[ClaimedDevice]) -> None:
        current = current_devices(slices)
        held = {(claim.pool, claim.device) for claim in claimed}
        self._pools = frozenset(current)
        kept = {name: uuid for name, uuid in self._uuids.items() if name in held or name[0] not in self._pools}
        self._uuids = kept | {(pool, name): uuid for pool, devices in current.items() for name, uuid in devices}

    def _explain(self, claim: ClaimedDevice, offered: str | None, is_synced: bool) -> str:
        if offered is not None:
            return "claim_device_without_uuid"
        if not is_synced:
            return "slices_not_synced"
        return "unknown_claim_device" if claim.pool in self._pools else "unknown_pool"

    def _without_admin_access(
        self, claimed: list[ClaimedDevice], prepared: PreparedClaims, is_synced: bool
    ) -> list[ClaimedDevice]:
        """Removes devices claimed with adminAccess, for example by monitoring pods, which do not hold the device."""
        admin = dict(prepared.admin)
        unknown = {(claim.namespace, claim.claim) for claim in claimed} - admin.keys()
        if self._reader is not None and is_synced:  # claims cannot be mapped before the first sync
            admin |= self._reader.read(unknown)
        return [
            claim
            for claim in claimed
            if (claim.pool, claim.device) not in admin.get((claim.namespace, claim.claim), ())
        ]


# Claims in the kubelet's answer


class ClaimedDevice(NamedTuple):
    """A device of a claim, held by a container."""

    holder: Workload
    namespace: str
    claim: str
    pool: str
    device: str

    def unmapped(self, reason: str) -> Unmapped:
        text = f"{NVIDIA_DRIVER}/{self.pool}/{self.device}"
        return Unmapped(SOURCE, reason, text, f"claim {self.namespace}/{self.claim}", self.holder)

    def build_attributes(self, mig_uuid: str, profile: str) -> Attributes:
        """Returns dcgm-exporter's labels in its order, without empty ones."""
        labels = (
            ("dra_claim_name", self.claim),
            ("dra_claim_namespace", self.namespace),
            ("dra_device_name", self.device),
            ("dra_driver_name", NVIDIA_DRIVER),
            ("dra_mig_device_uuid", mig_uuid),
            ("dra_mig_profile", profile),
            ("dra_pool_name", self.pool),
        )
        return tuple((name, value) for name, value in labels if value)


def parse_claims(response: Any) -> Iterator[ClaimedDevice]:
    """Yields the claimed devices of a decoded List answer. Kubelets before 1.31 do not report device names."""
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Workload(pod.namespace, pod.name, container.name)
            for claim in container.dynamic_resources:
                for resource in claim.claim_resources:
                    if resource.driver_name == NVIDIA_DRIVER:
                        claimed = claim.claim_namespace, claim.claim_name, resource.pool_name, resource.device_name
                        yield ClaimedDevice(holder, *claimed)


# ResourceClaims


def admin_devices(claim: object) -> frozenset[DeviceName]:
    """Returns the devices that were allocated to a ResourceClaim with adminAccess.

    In Kubernetes 1.31 only the request contains adminAccess; in later versions the result does, too.
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
                # A starting API server rejects everything, so the delay is longer only after a second rejection.
                is_refused = error.reason in REFUSALS and error.reason == self._logged
                self._retry_at = self._clock() + (_RETRY_REFUSED_SECONDS if is_refused else _RETRY_SECONDS)
                if error.reason != self._logged:
                    self._logged = error.reason
                    _log.warning(
                        "cannot read resourceclaims, so pods with adminAccess are reported as holders: %s; will retry",
                        error,
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
        if error.reason != "not_found":  # `not_found`: a deleted claim, which the kubelet still lists for a moment
            raise
        return {}


# The driver's checkpoint


@dataclass(frozen=True, slots=True)
class PreparedClaims:
    """The claims that the driver has prepared on this node."""

    uuids: Mapping[DeviceName, str]  # current UUIDs of GPUs and MIG devices
    admin: Mapping[ClaimName, frozenset[DeviceName]]  # devices of each claim that were allocated with adminAccess


class _CheckpointVersion(Struct):
    claims: dict[str, dict[str, object]] | None = field(name="preparedClaims", default=None)


class _CheckpointFile(Struct):
    v1: _CheckpointVersion | None = None
    v2: _CheckpointVersion | None = None


class DriverCheckpoint:
    """Reads the driver's checkpoint. Uses the last valid content while the file is invalid."""

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
                _log.warning("checkpoint of the DRA driver: %s; the last content is used", error)
        return self._last


def parse_driver_checkpoint(content: bytes, path: str = "the driver's checkpoint") -> PreparedClaims:
    """Parses version 2, or version 1, which has neither claim names nor states."""
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
