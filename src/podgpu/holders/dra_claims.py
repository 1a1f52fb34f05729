"""This module says what is told of single claims (DRA): the live UUID of each device, and which of them were given for
looking only.

Two know it: the NVIDIA driver's own checkpoint, where its directory is mounted, and the API server. The kubelet knows
neither, nor do the ResourceSlices know the UUID of a MIG device that is made when it is claimed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from podgpu.errors import SourceError
from podgpu.files import ReadOnChange
from podgpu.json_shape import as_list, as_object, as_text, list_in, mapping_in, parse_json
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import NVIDIA_DRIVER, RESOURCE_GROUP, find_resource_version
from podgpu.kube.reflector import REFUSALS

NAME = f"plugins/{NVIDIA_DRIVER}/checkpoint.json"
"""In the kubelet's own directory."""
MOST_BYTES = 16 * 1024 * 1024
_ASK_SECONDS = 2.0
"""For all claims that were not seen before, within one reading."""
_ASK_AGAIN_SECONDS = 10.0
_REFUSED_SECONDS = 60.0
"""After a second refusal, which stands until a person changes something. A server that starts refuses everything for a
moment, until it has read its rules."""
_PREPARED = ("PrepareCompleted", "")
"""States of a claim in the checkpoint; its first version has none."""

_log = logging.getLogger("podgpu")

ClaimName = tuple[str, str]
"""Namespace and name."""
DeviceName = tuple[str, str]
"""Pool and name."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the driver made ready for the claims of this node."""

    uuids: Mapping[DeviceName, str] = field(default_factory=dict)
    """Of GPUs and MIG devices as they are now."""
    admin: Mapping[ClaimName, frozenset[DeviceName]] = field(default_factory=dict)
    """Of every claim, those of its devices that were given for looking only (`adminAccess`)."""


# The driver's checkpoint


class DriverCheckpoint:
    """The file as it is now; one that makes no sense leaves in place what it last said."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = ReadOnChange(parse_driver_checkpoint, MOST_BYTES)
        self._last = Prepared()
        self._said = ""

    def read(self) -> Prepared:
        try:
            self._last, self._said = self._file.read(self.path), ""
        except SourceError as error:
            if error.reason == "file_missing":
                self._last = Prepared()  # not mounted, or not this driver
            elif error.reason != self._said:
                self._said = error.reason
                _log.warning("the DRA driver's checkpoint: %s; podgpu goes on with what it last said", error)
        return self._last


def parse_driver_checkpoint(content: bytes, path: str = "the driver's checkpoint") -> Prepared:
    """Versions 1 and 2 are both in the file; only the second has the claims' names."""
    return parse_json(content, path, _prepared)


def _prepared(value: object) -> Prepared:
    whole = as_object(value, "the whole")
    version = next((key for key in ("v2", "v1") if whole.get(key) is not None), None)
    if version is None:
        return Prepared()
    claims = as_object(whole[version], version).get("preparedClaims")
    uuids: dict[DeviceName, str] = {}
    admin: dict[ClaimName, frozenset[DeviceName]] = {}
    for uid, each in as_object({} if claims is None else claims, "preparedClaims").items():
        claim = as_object(each, f"the claim {uid!a}")
        if claim.get("checkpointState", "") in _PREPARED:
            uuids.update(_uuids(claim))
            name = as_text(claim.get("namespace", ""), "a namespace"), as_text(claim.get("name", ""), "a name")
            if all(name):
                admin[name] = admin_devices(claim)
    return Prepared(uuids, admin)


def _uuids(claim: Mapping[str, object]) -> Iterator[tuple[DeviceName, str]]:
    for group in as_list(claim.get("preparedDevices"), "preparedDevices"):
        for entry in as_list(as_object(group, "a group of devices").get("devices"), "devices"):
            device = as_object(entry, "a device")
            # Where the UUID is: a MIG device has had three shapes so far.
            for kind, part, key in (
                ("gpu", "info", "uuid"),
                ("mig", "concrete", "migUUID"),
                ("mig", "created", "uuid"),
                ("mig", "info", "uuid"),
            ):
                found = mapping_in(device.get(kind))
                names = mapping_in(found.get("device"))
                uuid = mapping_in(found.get(part)).get(key)
                if isinstance(uuid, str) and uuid:
                    pool, name = (as_text(names.get(word), word) for word in ("PoolName", "DeviceName"))
                    yield (pool, name), uuid


# What a claim says of itself


def admin_devices(claim: Mapping[str, Any], driver: str = NVIDIA_DRIVER) -> frozenset[DeviceName]:
    """The driver's devices that this ResourceClaim was given for looking only. Never raises.

    Kubernetes 1.31 says so of the request alone; later ones say it of what was given, too.
    """
    asked = list_in(mapping_in(mapping_in(claim.get("spec")).get("devices")).get("requests"))
    looking = {
        request.get("name")
        for request in map(mapping_in, asked)
        if True in (request.get("adminAccess"), mapping_in(request.get("exactly")).get("adminAccess"))
    }
    allocation = mapping_in(mapping_in(claim.get("status")).get("allocation"))
    given = [mapping_in(result) for result in list_in(mapping_in(allocation.get("devices")).get("results"))]
    return frozenset(
        (str(result.get("pool")), str(result.get("device")))
        for result in given
        if result.get("driver") == driver and (result.get("adminAccess") is True or result.get("request") in looking)
    )


class ClaimReader:
    """Asks the API server about each claim once: what it was given does not change for as long as it is held."""

    def __init__(self, config: ApiConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._known: dict[ClaimName, frozenset[DeviceName]] = {}
        self._ask_at = float("-inf")
        self._said = ""

    def read(self, held: Collection[ClaimName]) -> Mapping[ClaimName, frozenset[DeviceName]]:
        """Of every claim that could be asked about, the devices given for looking only. Waits for 2 s at most, and
        after a failure not at all for a while."""
        self._known = {name: devices for name, devices in self._known.items() if name in held}
        new = sorted(set(held) - self._known.keys())
        if new and self._clock() >= self._ask_at:
            try:
                asyncio.run(self._ask(new))
                self._said = ""
            except SourceError as error:
                is_refusal = error.reason in REFUSALS and error.reason == self._said
                self._ask_at = self._clock() + (_REFUSED_SECONDS if is_refusal else _ASK_AGAIN_SECONDS)
                self._say(error)
        return self._known

    def _say(self, error: SourceError) -> None:
        if error.reason != self._said:
            self._said = error.reason
            _log.warning(
                "resourceclaims cannot be read, so claims with adminAccess count as holders: %s; asked again", error
            )

    async def _ask(self, names: Collection[ClaimName]) -> None:
        try:
            async with asyncio.timeout(_ASK_SECONDS), ApiClient(self._config, verbs=("get",)) as client:
                version = await find_resource_version(client)  # each time: an upgraded server has no older ones
                for namespace, name in names:
                    self._known[namespace, name] = admin_devices(await _claim(client, version, namespace, name))
        except TimeoutError as error:
            raise SourceError("timeout", f"no answer about them within {_ASK_SECONDS:g} s") from error


async def _claim(client: ApiClient, version: str, namespace: str, name: str) -> Mapping[str, Any]:
    """Empty for one that is gone: the kubelet knows of it for a moment longer."""
    parts = (RESOURCE_GROUP, version, "namespaces", quote(namespace, ""), "resourceclaims", quote(name, ""))
    try:
        return await client.get("/".join(parts))
    except SourceError as error:
        if error.reason != "not_found":
            raise
        return {}
