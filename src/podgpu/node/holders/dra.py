"""Finds the GPUs that containers hold through ResourceClaims (DRA).

The kubelet reports the claims of each container. ResourceSlices contain the UUID of each device.
The DRA driver's checkpoint and the API server contain the details of an allocation, such as
`adminAccess` and the consumed capacity. The checkpoint also contains the UUIDs of MIG devices that
were created for a claim.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec import field as json_field

from podgpu.decode import convert, decode_json, malformed
from podgpu.errors import SourceError
from podgpu.files import ReadOnChange
from podgpu.kube.api_groups import DRA_GROUP, find_version
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import (
    KubeObject,
    PodRecord,
    parse_quantity,
    read_list,
    read_map,
)
from podgpu.kube.reflector import Informer
from podgpu.model import (
    Allocation,
    Assignment,
    Device,
    Pairs,
    Unmapped,
    Workload,
)
from podgpu.node.holders import KUBELET
from podgpu.node.holders.api import ApiAccess
from podgpu.node.holders.device_ids import DeviceIndex, add_shares, parse_device_id, sort_allocation

NVIDIA_DRIVER = "gpu.nvidia.com"
DRIVER_CHECKPOINT = f"plugins/{NVIDIA_DRIVER}/checkpoint.json"
"""Path relative to the kubelet's root directory."""
_MAX_CHECKPOINT_BYTES = 16 * 1024 * 1024
_READ_CLAIMS_SECONDS = 2.0
_RETRY_SECONDS = 10.0

ClaimName = tuple[str, str]  # namespace and name
DeviceName = tuple[str, str]  # pool and name

_log = logging.getLogger("podgpu")


@dataclass(eq=False)
class DraClaims:
    """Maps the claims in the kubelet's answer to devices.

    `slices`, `checkpoint`, `reader` and `pods` are optional.
    """

    slices: Informer[PoolSlice] | None
    checkpoint: DriverCheckpoint | None = None
    reader: ClaimReader | None = None
    pods: Callable[[], Sequence[PodRecord]] = tuple  # the node's pods in the API server
    _pools: frozenset[str] = frozenset()
    # Known devices by name. Devices of removed pools, and held devices, are kept, because slices
    # disappear while the driver is stopped.
    _offered: dict[DeviceName, SliceDevice] = field(default_factory=dict)

    def held(self, response: Any, devices: Sequence[Device]) -> Allocation:
        prepared = PreparedClaims() if self.checkpoint is None else self.checkpoint.read()
        claimed = list(parse_claims(response))
        is_synced = self._update_offered({claim.device for claim in claimed})
        users = self._find_users(claimed, prepared, is_synced)
        # Several containers may use the same device of a claim. They share it.
        user_counts = Counter((claim.name, claim.device) for claim in users)

        index = DeviceIndex(devices)
        assignments: dict[tuple[str, Workload], list[Assignment]] = defaultdict(list)
        unmapped = set()
        for claim, results in users.items():
            # adminAccess is for monitoring, so the pod does not hold the device.
            if results and all(result.admin for result in results):
                continue

            offered = self._find_offered(claim.device, prepared)
            device = _find_device(index, offered.uuid)
            if device is not None:
                user_count = user_counts[claim.name, claim.device]
                assignment = _make_assignment(claim, results, offered, device, user_count)
                assignments[device.key, claim.holder].append(assignment)
            elif offered.uuid:
                unmapped.add(claim.unmapped("unknown_device"))
            else:
                reason = self._explain(claim, is_synced)
                unmapped.add(claim.unmapped(reason))
        return sort_allocation(map(_unite_claims, assignments.values()), unmapped)

    def _find_offered(self, name: DeviceName, prepared: PreparedClaims) -> SliceDevice:
        """Returns the device in its ResourceSlice. The UUID may be from the checkpoint."""
        offered = self._offered.get(name, SliceDevice())
        if offered.uuid:
            return offered
        return offered._replace(uuid=prepared.uuids.get(name, ""))

    def _find_users(
        self, claimed: Sequence[ClaimedDevice], prepared: PreparedClaims, is_synced: bool
    ) -> dict[ClaimedDevice, list[ClaimResult]]:
        """Returns the claimed devices that containers use, with the results for each device."""
        results = dict(prepared.results)
        # Before the first sync, no claim can be mapped.
        if self.reader is not None and is_synced:
            unread: defaultdict[ClaimName, set[ClaimedDevice]] = defaultdict(set)
            for claim in claimed:
                if claim.name not in results:
                    unread[claim.name].add(claim)
            results |= self.reader.read(unread)

        requests = _find_requests(self.pods())
        users = {}
        for claim in claimed:
            own = _select_results(claim, results.get(claim.name, ()), requests)
            if own is not None:
                users[claim] = own
        return users

    def _update_offered(self, held: Set[DeviceName]) -> bool:
        """Returns False, and changes nothing, before the first list of slices.

        Uses the newest generation of each pool, even if some of its slices are missing.
        """
        if self.slices is None or not self.slices.synced:
            return False

        slices = self.slices.items()
        newest: dict[str, int] = {}  # generation of each pool
        for pool_slice in slices:
            earlier = newest.get(pool_slice.pool, 0)
            newest[pool_slice.pool] = max(pool_slice.generation, earlier)
        self._pools = frozenset(newest)

        # Forgets a device only if no claim holds it, and its pool has slices without it.
        offered = {}
        for name, device in self._offered.items():
            pool, _ = name
            if name in held or pool not in self._pools:
                offered[name] = device

        for pool_slice in slices:
            if pool_slice.generation == newest[pool_slice.pool]:
                for device in pool_slice.devices:
                    offered[pool_slice.pool, device.name] = device
        self._offered = offered
        return True

    def _explain(self, claim: ClaimedDevice, is_synced: bool) -> str:
        """Returns why a claim identifies no device."""
        if claim.device in self._offered:
            return "claim_device_without_uuid"
        if not is_synced:
            return "slices_not_synced"
        pool, _ = claim.device
        if pool in self._pools:
            return "unknown_claim_device"
        return "unknown_pool"


def _find_device(index: DeviceIndex, uuid: str) -> Device | None:
    device_id = parse_device_id(uuid)
    # A UUID, but no other device id.
    if device_id is None or not uuid.startswith(("GPU-", "MIG-")):
        return None
    return next(iter(index.find(device_id)), None)


def _find_requests(pods: Iterable[PodRecord]) -> dict[tuple[Workload, str], set[str]]:
    """Returns the requests of a claim that a container uses, by container and claim.

    An empty text stands for the whole claim.
    """
    requests: dict[tuple[Workload, str], set[str]] = defaultdict(set)
    for pod in pods:
        for container in pod.all_containers:
            holder = Workload(pod.namespace, pod.name, container.name)
            for claim, request in container.claims:
                key = holder, claim
                requests[key].add(_strip_subrequest(request))
    return requests


def _select_results(
    claim: ClaimedDevice,
    results: Iterable[ClaimResult],
    requests: Mapping[tuple[Workload, str], set[str]],
) -> list[ClaimResult] | None:
    """Returns the results for the claimed device. Empty if the results are not known.

    Returns None if the container uses only other requests of the claim, because the kubelet lists
    all devices of the claim.
    """
    own = [result for result in results if (result.pool, result.device) == claim.device]
    _, claim_name = claim.name
    # If the pod is not known, the container may use the whole claim (an empty text).
    used_requests = requests.get((claim.holder, claim_name), {""})
    if not own or "" in used_requests:
        return own

    used = [result for result in own if _strip_subrequest(result.request) in used_requests]
    return used or None


def _strip_subrequest(request: str) -> str:
    """Removes the subrequest from `<request>/<subrequest>`."""
    return request.partition("/")[0]


def _make_assignment(
    claim: ClaimedDevice,
    results: Sequence[ClaimResult],
    offered: SliceDevice,
    device: Device,
    user_count: int,
) -> Assignment:
    """`user_count`: number of containers that use the claim, which share it equally."""
    share = _compute_share(results, dict(offered.capacity), device)
    if share is not None:
        share /= user_count

    # The slice only says that the device can be shared, the results that it is.
    is_shared = offered.is_shared
    if results:
        is_shared = any(result.share_id for result in results)

    mig_uuid = offered.uuid if device.is_instance else ""
    attributes = claim.build_attributes(mig_uuid, device.profile)
    return Assignment(
        device.key,
        claim.holder,
        KUBELET,
        share=share,
        attributes=attributes,
        is_shared=is_shared,
    )


def _compute_share(
    results: Sequence[ClaimResult], capacity: Mapping[str, str], device: Device
) -> float | None:
    """Returns the fraction of the device's capacity that the claim consumes.

    Returns None if the fraction is unknown or not limited. If no ResourceSlice contains the memory
    capacity, the memory that the GPU driver reports is used.
    """
    consumed = [_strip_domains(result.consumed or {}) for result in results if not result.admin]
    for name in ("shares", "memory"):
        part = Fraction(0)
        try:
            whole = parse_quantity(capacity.get(name, "0"))
            for amounts in consumed:
                part += parse_quantity(str(amounts.get(name, 0)))
        except ValueError:
            continue
        if name == "memory" and not whole:
            whole = Fraction(device.memory_bytes or 0)
        if part and whole:
            return min(1.0, float(part / whole))
    return None


def _unite_claims(assignments: Sequence[Assignment]) -> Assignment:
    """Combines the claims of one container on one device into one assignment. Adds their shares.

    Has the labels of one claim, always the same one.
    """
    first = min(assignments, key=attrgetter("attributes"))
    share = add_shares(assignment.share for assignment in assignments)
    is_shared = any(assignment.is_shared for assignment in assignments)
    return replace(first, share=share, is_shared=is_shared)


# ResourceSlices

_GROUP = f"/apis/{DRA_GROUP}"
_VERSIONS = ("v1", "v1beta2", "v1beta1", "v1alpha3")
"""API versions of Kubernetes 1.34, 1.33, 1.32 and 1.31. Older versions have no device names."""


class SliceDevice(NamedTuple):
    name: str = ""
    uuid: str = ""  # empty for a MIG device that is created when it is claimed (DynamicMIG)
    capacity: Pairs = ()  # quantities by name, such as `memory`
    is_shared: bool = False  # several claims can share the capacity (DRAConsumableCapacity)


class PoolSlice(NamedTuple):
    """A ResourceSlice, which lists some or all devices of a pool in one generation."""

    pool: str
    generation: int
    devices: tuple[SliceDevice, ...] = ()


def watch_slices(api: ApiAccess) -> Informer[PoolSlice]:
    """Watches this node's ResourceSlices. Raises NoApi if there is no API server."""
    selector = {"fieldSelector": f"spec.driver={NVIDIA_DRIVER},spec.nodeName={api.node}"}
    return api.watch(f"{_GROUP}/v1/resourceslices", selector, parse_slice, _find_slices_path)


async def _find_slices_path(client: ApiClient) -> str:
    return f"{_GROUP}/{await _find_version(client)}/resourceslices"


async def _find_version(client: ApiClient) -> str:
    advice = "DRA needs Kubernetes 1.31 or later, and must be enabled explicitly before 1.34"
    return await find_version(client, DRA_GROUP, _VERSIONS, advice)


def parse_slice(body: KubeObject) -> PoolSlice:
    spec = body["spec"]
    devices = tuple(map(_parse_slice_device, read_list(spec, "devices")))
    return PoolSlice(spec["pool"]["name"], spec["pool"].get("generation", 0), devices)


def _parse_slice_device(body: KubeObject) -> SliceDevice:
    device = body.get("basic") or body  # v1beta1 and v1alpha3 nest the fields in `basic`
    attributes = _strip_domains(read_map(device, "attributes"))
    uuid = read_map(attributes, "uuid").get("string")

    capacity = []
    for name, entry in _strip_domains(read_map(device, "capacity")).items():
        capacity.append((name, str(entry["value"])))

    is_shared = bool(device.get("allowMultipleAllocations"))
    return SliceDevice(body["name"], uuid or "", tuple(capacity), is_shared)


def _strip_domains(members: KubeObject) -> KubeObject:
    """Removes the driver's domain from attribute and capacity names.

    Only some drivers write it.
    """
    return {name.removeprefix(f"{NVIDIA_DRIVER}/"): value for name, value in members.items()}


# Claims in the kubelet's answer


class ClaimedDevice(NamedTuple):
    holder: Workload
    name: ClaimName
    device: DeviceName

    def unmapped(self, reason: str) -> Unmapped:
        text = "/".join((NVIDIA_DRIVER, *self.device))
        return Unmapped(KUBELET, reason, text, f"claim {'/'.join(self.name)}", self.holder)

    def build_attributes(self, mig_uuid: str, profile: str) -> Pairs:
        """Returns dcgm-exporter's labels for a claim, in dcgm-exporter's order.

        Omits empty labels.
        """
        namespace, claim = self.name
        pool, device = self.device
        labels = {
            "dra_claim_name": claim,
            "dra_claim_namespace": namespace,
            "dra_device_name": device,
            "dra_driver_name": NVIDIA_DRIVER,
            "dra_mig_device_uuid": mig_uuid,
            "dra_mig_profile": profile,
            "dra_pool_name": pool,
        }
        return tuple((name, value) for name, value in labels.items() if value)


def parse_claims(response: Any) -> Iterator[ClaimedDevice]:
    """Yields the claimed devices in the kubelet's decoded List answer."""
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Workload(pod.namespace, pod.name, container.name)
            for claim in container.dynamic_resources:
                name = claim.claim_namespace, claim.claim_name
                for device in claim.claim_resources:
                    if device.driver_name == NVIDIA_DRIVER:
                        device_name = device.pool_name, device.device_name
                        yield ClaimedDevice(holder, name, device_name)


# ResourceClaims


class ClaimResult(Struct):
    """One allocation of a device to a claim.

    A claim can have several results for the same device.
    """

    request: str = ""  # `<request>/<subrequest>` if the claim lists alternatives
    driver: str = ""
    pool: str = ""
    device: str = ""
    admin: bool | None = json_field(name="adminAccess", default=None)
    # Set if several claims can share the device.
    share_id: str | None = json_field(name="shareID", default=None)
    consumed: dict[str, str | int | float] | None = json_field(
        name="consumedCapacity", default=None
    )


def _read_results(status: KubeObject) -> tuple[ClaimResult, ...]:
    allocation = read_map(status, "allocation")
    devices = read_map(allocation, "devices")
    results = convert(read_list(devices, "results"), list[ClaimResult])
    return tuple(result for result in results if result.driver == NVIDIA_DRIVER)


class ReadClaim(NamedTuple):
    users: Set[ClaimedDevice]
    results: tuple[ClaimResult, ...]


@dataclass(eq=False)
class ClaimReader:
    """Reads claims from the API server, and caches them while they are held."""

    _config: ApiConfig
    _clock: Callable[[], float] = time.monotonic
    _cached: dict[ClaimName, ReadClaim] = field(default_factory=dict)
    _retry_at: float = float("-inf")
    _logged: str = ""

    def read(
        self, held: Mapping[ClaimName, Set[ClaimedDevice]]
    ) -> Mapping[ClaimName, tuple[ClaimResult, ...]]:
        """Returns the results of all claims that could be read.

        Waits at most 2 s. `held`: the users of each claim.
        """
        cached = {}
        new = {}
        for name, users in sorted(held.items()):
            known = self._cached.get(name)
            # A held claim keeps its allocation. If none of its users was there before, it may be
            # another claim with the same name.
            if known is not None and users & known.users:
                cached[name] = ReadClaim(users, known.results)
            else:
                new[name] = users
        self._cached = cached

        if new and self._clock() >= self._retry_at:
            try:
                asyncio.run(self._fetch_into_cache(new))
                self._logged = ""
            except SourceError as error:
                self._retry_at = self._clock() + _RETRY_SECONDS
                if error.reason != self._logged:
                    self._logged = error.reason
                    _log.warning(
                        "cannot read resourceclaims, so pods with adminAccess are reported as "
                        "holders, and shares are unknown: %s; will retry",
                        error,
                    )
        return {name: claim.results for name, claim in self._cached.items()}

    async def _fetch_into_cache(self, held: Mapping[ClaimName, Set[ClaimedDevice]]) -> None:
        """Raises SourceError after a timeout. The cache then has what was read before it."""
        try:
            async with asyncio.timeout(_READ_CLAIMS_SECONDS), ApiClient(self._config) as client:
                # The version is not cached, because an upgrade can remove versions.
                version = await _find_version(client)
                for name, users in held.items():
                    results = await _get_results(client, version, name)
                    self._cached[name] = ReadClaim(users, results)
        except TimeoutError as error:
            raise SourceError("timeout", f"no answer within {_READ_CLAIMS_SECONDS:g} s") from error


async def _get_results(client: ApiClient, version: str, name: ClaimName) -> tuple[ClaimResult, ...]:
    namespace, claim_name = name
    path = f"{_GROUP}/{version}/namespaces/{namespace}/resourceclaims/{claim_name}"
    try:
        claim = await client.get(path)
        return _read_results(read_map(claim, "status"))
    except SourceError as error:
        # The kubelet still lists a deleted claim for a moment.
        if error.reason == "not_found":
            return ()
        raise


# The driver's checkpoint


class PreparedClaims(NamedTuple):
    """The claims that the DRA driver has prepared on this node."""

    uuids: Mapping[DeviceName, str] = {}  # UUIDs of GPUs and MIG devices
    results: Mapping[ClaimName, tuple[ClaimResult, ...]] = {}


class DriverCheckpoint:
    """Reads the checkpoint of the DRA driver.

    While the file is invalid, uses its last valid content.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = ReadOnChange(parse_driver_checkpoint, _MAX_CHECKPOINT_BYTES)
        self._last = PreparedClaims()
        self._logged = ""

    def read(self) -> PreparedClaims:
        try:
            self._last = self._file.read(self.path)
            self._logged = ""
        except SourceError as error:
            if error.reason == "file_missing":
                # The file is not mounted, or the node uses another DRA driver.
                self._last = PreparedClaims()
            elif error.reason != self._logged:
                self._logged = error.reason
                _log.warning(
                    "cannot read the DRA driver's checkpoint: %s; using its last valid content",
                    error,
                )
        return self._last


def parse_driver_checkpoint(content: bytes, path: str) -> PreparedClaims:
    """Parses version 2 of the file. Raises SourceError if it is malformed."""
    uuids: dict[DeviceName, str] = {}
    results: dict[ClaimName, tuple[ClaimResult, ...]] = {}
    document = decode_json(content, path, KubeObject)
    try:
        claims = read_map(read_map(document, "v2"), "preparedClaims")
        for claim in claims.values():
            if claim.get("checkpointState") not in ("PrepareCompleted", "", None):
                continue
            uuids |= _read_uuids(claim)
            if claim.get("status"):
                name = claim.get("namespace"), claim.get("name")
                results[name] = _read_results(claim["status"])
    except (AttributeError, LookupError, TypeError, msgspec.ValidationError) as error:
        raise malformed(path, str(error)) from error
    return PreparedClaims(uuids, results)


def _read_uuids(claim: KubeObject) -> dict[DeviceName, str]:
    """Returns the UUIDs of the devices that are prepared for a claim."""
    uuids: dict[DeviceName, str] = {}
    for group in read_list(claim, "preparedDevices"):
        for entry in read_list(group, "devices"):
            device = entry.get("gpu") or entry.get("mig")
            if device:
                name = device["device"]
                uuids[name["PoolName"], name["DeviceName"]] = _find_uuid(device)
    return uuids


def _find_uuid(device: KubeObject) -> str:
    """Returns the UUID of a device. Its JSON key depends on the version of the driver."""
    for name in ("info", "created", "concrete"):
        part = read_map(device, name)
        uuid: str = part.get("uuid") or part.get("migUUID") or ""
        if uuid:
            return uuid
    return ""
