"""This module finds the GPUs held through ResourceClaims (DRA): the kubelet says who holds which claim, ResourceSlices
which GPU that is.

Reads what others brought: the kubelet's decoded answer, slices from a feed that somebody else keeps up to date, and
what `dra_claims.py` knows of single claims.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from podgpu.holders.device_ids import DeviceIndex
from podgpu.holders.dra_claims import ClaimReader, DeviceName, DriverCheckpoint, Prepared
from podgpu.holders.holdings import in_order, parse_id
from podgpu.holders.kubelet import SOURCE
from podgpu.kube.objects import NVIDIA_DRIVER, PoolSlice, SliceDevice, current_devices
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload

Attributes = tuple[tuple[str, str], ...]
Pools = Mapping[str, Mapping[str, SliceDevice]]
"""Pool -> device name -> device."""

_UUID = re.compile(r"(?<!MIG-)(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class SliceFeed(Protocol):
    """An `Informer` with `parse_slice`; whoever made it closes it."""

    def items(self) -> tuple[PoolSlice, ...]:
        """The same tuple until something changes."""
        ...

    @property
    def synced(self) -> bool: ...


class DraClaims:
    """Turns the claims in a kubelet's answer into assignments."""

    def __init__(
        self,
        feed: SliceFeed | None,
        driver: str = NVIDIA_DRIVER,
        checkpoint: DriverCheckpoint | None = None,
        reader: ClaimReader | None = None,
    ) -> None:
        """Any of the three that know more of a claim than the kubelet may be missing."""
        self.feed = feed
        self.driver = driver
        self._checkpoint = checkpoint
        self._reader = reader
        self._seen: tuple[PoolSlice, ...] = ()
        self._pools: Pools = {}
        self._remembered: dict[DeviceName, SliceDevice] = {}
        """The devices of every pool that claims were held of, as its slices last told: a driver that is away takes them
        along, and a kubelet that starts without it deletes them before it lists a claim."""

    def held(self, response: Any, devices: Sequence[Device]) -> Allocation:
        """Who holds which of the devices through a claim, from a decoded List answer."""
        prepared = Prepared() if self._checkpoint is None else self._checkpoint.read()
        pools = self._known_pools() if self.feed is not None and self.feed.synced else None
        claimed = self._without_lookers(list(parse_claims(response, self.driver)), prepared, pools is not None)
        self._remember(claimed, pools or {})
        return map_claims(claimed, pools, devices, self._remembered, prepared.uuids)

    def _without_lookers(self, claimed: list[Claimed], prepared: Prepared, is_api_known: bool) -> list[Claimed]:
        """A claim with adminAccess, a monitoring pod's, is no holder: beside it the true one goes on.

        An API server that never answered is not asked: it is as soon as the slices are there, and so before a claim
        can be mapped by them.
        """
        admin = dict(prepared.admin)
        unknown = {(claim.namespace, claim.claim) for claim in claimed} - admin.keys()
        if self._reader is not None and is_api_known:
            admin |= self._reader.read(unknown)
        return [
            claim
            for claim in claimed
            if (claim.pool, claim.device) not in admin.get((claim.namespace, claim.claim), ())
        ]

    def _remember(self, claimed: Iterable[Claimed], pools: Pools) -> None:
        """Forgotten is what its pool no longer offers and nobody holds. Not only what is held is remembered: a kubelet
        that was started anew lists no claims at first."""
        held = {(claim.pool, claim.device) for claim in claimed}
        local = {pool for pool, _ in (*held, *self._remembered)} & pools.keys()
        offered = {(pool, name): device for pool in local for name, device in pools[pool].items()}
        kept = {name: device for name, device in self._remembered.items() if name in held or name[0] not in pools}
        self._remembered = kept | offered

    def _known_pools(self) -> Pools:
        slices = () if self.feed is None else self.feed.items()
        if slices is not self._seen:
            current = current_devices(offered for offered in slices if offered.driver == self.driver)
            self._pools = {pool: {device.name: device for device in found} for (_, pool), found in current.items()}
            self._seen = slices
        return self._pools


class Claimed(NamedTuple):
    """One device of one claim in one container's hands, as the kubelet names it."""

    holder: Workload
    namespace: str
    claim: str
    driver: str = ""
    pool: str = ""
    device: str = ""
    cdi_name: str = ""
    """Where pool and device are not told: by kubelets of 1.27 to 1.30."""

    def unmapped(self, reason: str) -> Unmapped:
        text = self.cdi_name or f"{self.driver}/{self.pool}/{self.device}"
        return Unmapped(SOURCE, reason, text, f"claim {self.namespace}/{self.claim}", self.holder)


def parse_claims(response: Any, driver: str = NVIDIA_DRIVER) -> Iterator[Claimed]:
    """The driver's devices in a decoded List answer."""
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Workload(pod.namespace, pod.name, container.name)
            for claim in container.dynamic_resources:
                whose = holder, claim.claim_namespace, claim.claim_name
                for resource in claim.claim_resources:
                    claimed = Claimed(*whose, resource.driver_name, resource.pool_name, resource.device_name)
                    if claimed.driver == driver and claimed.pool and claimed.device:
                        yield claimed
                    elif claimed.driver in ("", driver):
                        yield from _parse_cdi_names(claimed, [cdi.name for cdi in resource.cdi_devices])


def _parse_cdi_names(claimed: Claimed, names: Sequence[str]) -> Iterator[Claimed]:
    """Names with a UUID in them, else one that says at least that a GPU is held.

    The kubelet repeats the names of the claim's earlier devices; a container holds all of them, so that does no harm.
    """
    telling = [name for name in names if _UUID.search(name)]
    if not telling:
        telling = [name for name in names if _is_gpu_kind(name)][:1] or ([""] if claimed.driver else [])
    for name in telling:
        yield claimed._replace(pool="", device="", cdi_name=name)


def _is_gpu_kind(cdi_name: str) -> bool:
    """`nvidia.com/gpu=0`, `k8s.gpu.nvidia.com/claim=…`; not the channels of `k8s.compute-domain.nvidia.com`."""
    kind = cdi_name.partition("=")[0]
    vendor = kind.partition("/")[0]
    return kind == "nvidia.com/gpu" or (vendor.endswith(".nvidia.com") and "gpu" in vendor.split("."))


class Found(NamedTuple):
    device: Device
    attributes: Attributes


def map_claims(
    claimed: Sequence[Claimed],
    pools: Pools | None,
    devices: Sequence[Device],
    remembered: Mapping[DeviceName, SliceDevice] | None = None,
    uuids: Mapping[DeviceName, str] | None = None,
) -> Allocation:
    """Who holds which of the devices. `pools` is None while the slices are not known yet.

    `remembered`: what slices that are gone told; `uuids`: what the driver says it has made ready.
    A holder holds a device once, be it through several claims: the first of them, by name, gives the labels.
    """
    resolver = _Resolver(claimed, pools, devices, remembered or {}, uuids or {})
    held: dict[tuple[str, Workload], Attributes] = {}
    unmapped: set[Unmapped] = set()
    for claim in claimed:
        found = resolver.find(claim)
        if isinstance(found, str):
            unmapped.add(claim.unmapped(found))
            continue
        key = found.device.key, claim.holder
        held[key] = min(found.attributes, held.get(key, found.attributes))
    return in_order(
        (Assignment(key, holder, SOURCE, attributes=attributes) for (key, holder), attributes in held.items()),
        unmapped,
    )


class _Resolver:
    """From the names of a claimed device to the device, or to the reason (a word) why there is none."""

    def __init__(
        self,
        claimed: Iterable[Claimed],
        pools: Pools | None,
        devices: Sequence[Device],
        remembered: Mapping[DeviceName, SliceDevice],
        uuids: Mapping[DeviceName, str],
    ) -> None:
        self._pools = pools
        self._remembered = remembered
        self._uuids = uuids
        self._index = DeviceIndex(devices)
        self._instances: dict[tuple[str, str], list[Device]] = defaultdict(list)
        """(parent, profile) -> GPU instances there are."""
        for device in devices:
            if device.is_instance:
                self._instances[device.uuid.lower(), device.profile].append(device)
        self._wanted: dict[tuple[str, str], set[SliceDevice]] = defaultdict(set)
        """(parent, profile) -> MIG devices in somebody's hands whose UUID is not published."""
        for claim in claimed:
            offered = self._offered(claim)
            if isinstance(offered, SliceDevice) and not offered.uuid:
                self._wanted[_layout(offered)].add(offered)

    def find(self, claim: Claimed) -> Found | str:
        if not claim.device:
            return self._find_by_cdi_name(claim)
        offered = self._offered(claim)
        uuid = (offered.uuid if isinstance(offered, SliceDevice) else "") or self._uuids.get(
            (claim.pool, claim.device), ""
        )
        if uuid:
            return self._with_uuid(claim, uuid)
        if isinstance(offered, str):
            return offered
        device = self._find_instance(offered)
        if isinstance(device, str):
            return device
        return Found(device, _attributes(claim, _only_mig_uuid(device), offered.profile))

    def _offered(self, claim: Claimed) -> SliceDevice | str:
        pool = (self._pools or {}).get(claim.pool, {})
        found = pool.get(claim.device) or self._remembered.get((claim.pool, claim.device))
        if found is not None:
            return found
        if self._pools is None:
            return "slices_not_synced"
        return "unknown_claim_device" if claim.pool in self._pools else "unknown_pool"

    def _find_by_uuid(self, uuid: str) -> Device | str:
        device_id = parse_id(uuid) if uuid.startswith(("GPU-", "MIG-")) else None
        found = self._index.find(device_id) if device_id is not None else ()
        return found[0] if found else "unknown_device"

    def _find_instance(self, offered: SliceDevice) -> Device | str:
        """A MIG device made when it was claimed: its slice tells parent, profile and placement, but no UUID.

        Which instance that became is certain only where there is one such instance and one such device is held.
        """
        if offered.type != "mig" or not offered.parent_uuid or not offered.profile:
            return "claim_device_without_uuid"
        instances = self._instances.get(_layout(offered), [])
        if not instances:
            return "unknown_device"
        if len(instances) > 1 or len(self._wanted[_layout(offered)]) > 1:
            return "ambiguous_mig_device"
        return instances[0]

    def _find_by_cdi_name(self, claim: Claimed) -> Found | str:
        uuid = _UUID.search(claim.cdi_name)
        return "claim_without_device_name" if uuid is None else self._with_uuid(claim, uuid[0])

    def _with_uuid(self, claim: Claimed, uuid: str) -> Found | str:
        device = self._find_by_uuid(uuid)
        if isinstance(device, str):
            return device
        if not device.is_instance:
            return Found(device, _attributes(claim))
        return Found(device, _attributes(claim, uuid, device.profile))


def _layout(offered: SliceDevice) -> tuple[str, str]:
    return offered.parent_uuid.lower(), offered.profile


def _only_mig_uuid(device: Device) -> str:
    return device.mig_uuids[0] if len(device.mig_uuids) == 1 else ""


def _attributes(claim: Claimed, mig_uuid: str = "", profile: str = "") -> Attributes:
    """dcgm-exporter's labels, in its order; without those that are not known."""
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
