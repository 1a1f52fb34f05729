"""This module asks for DCGM's own judgement of each GPU: its health watches, and whom it reaches over NVLink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import byref

from podgpu.errors import DriverGone, SourceError
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.library import versioned
from podgpu.gpu.dcgm.session import DcgmSession
from podgpu.gpu.dcgm.structs import EntityGroup
from podgpu.metrics.conditions import health_code
from podgpu.model import Detail

HEALTH_FIELD, P2P_FIELD = 9003, 9004
_PASS = 0
_WATCHES = {
    0x1: "PCIE",
    0x2: "NVLINK",
    0x4: "PMU",
    0x8: "MCU",
    0x10: "MEM",
    0x20: "SM",
    0x40: "INFOROM",
    0x80: "THERMAL",
    0x100: "POWER",
    0x200: "DRIVER",
    s.HEALTH_ALL: "ALL",
}
_P2P = (
    *("OK", "ChipsetNotSupported", "GPUNotSupported", "TopologyNotSupported"),
    *("DisabledByRegKey", "NotSupported", "Unknown"),
)

Details = Mapping[int, tuple[Detail, ...]]
"""GPU id -> what is to be said of it."""


def set_health(session: DcgmSession, groups: Sequence[int]) -> None:
    """Begin to watch; a check before that finds nothing."""
    for group in groups:
        session.call("dcgmHealthSet", group, s.HEALTH_ALL)


def check_health(session: DcgmSession, groups: Sequence[int], gpu_ids: Sequence[int]) -> Details:
    """One answer per watch and GPU. Of several incidents the worst counts: a warning must not hide a failure."""
    worst: dict[tuple[int, int], tuple[int, int]] = {}
    for group in groups:
        response = versioned(s.HealthResponseV5 if session.library.major >= 4 else s.HealthResponseV4)
        session.call("dcgmHealthCheck", group, byref(response))
        for incident in response.incidents[: response.incidentCount]:
            if incident.entity.group == EntityGroup.GPU and incident.system in _WATCHES:
                where = (incident.entity.id, incident.system)
                worst[where] = max(worst.get(where, (_PASS, 0)), (incident.health, incident.code))
    return {gpu: tuple(_health_details(gpu, worst)) for gpu in gpu_ids}


def _health_details(gpu: int, worst: Mapping[tuple[int, int], tuple[int, int]]) -> list[Detail]:
    """Every watch speaks, but for the one about the whole GPU, which only ever has failures to tell."""
    speaking = [w for w in _WATCHES if w != s.HEALTH_ALL or (gpu, w) in worst]
    found = ((_WATCHES[w], *worst.get((gpu, w), (_PASS, 0))) for w in speaking)
    return [Detail(HEALTH_FIELD, (*_code_labels(code), ("health_watch", name)), health) for name, health, code in found]


def _code_labels(number: int) -> tuple[tuple[str, str], ...]:
    code = health_code(number)
    return (
        ("health_error_code", code.name),
        ("health_error_severity", code.severity),
        ("health_error_category", code.category),
    )


def read_p2p(session: DcgmSession, gpu_ids: Sequence[int]) -> Details:
    status = versioned(s.NvLinkP2PStatus)
    session.call("dcgmGetNvLinkP2PStatus", byref(status))
    return {
        gpu.entityId: tuple(
            Detail(P2P_FIELD, (("link_status", _P2P[state]), ("peer_gpu", str(peer))), state)
            for peer in gpu_ids
            if peer != gpu.entityId and 0 <= (state := gpu.linkStatus[peer]) < len(_P2P)
        )
        for gpu in status.gpus[: status.numGpus]
    }


class Judgement:
    """What was asked for of the two, as of the last turn. What fails costs only itself."""

    def __init__(self) -> None:
        self.details: Details = {}
        self.errors: dict[int, SourceError] = {}
        """Field id -> why it has no answer."""

    def read(self, session: DcgmSession, wanted: set[int], groups: Sequence[int], gpu_ids: Sequence[int]) -> None:
        reads: Mapping[int, Callable[[], Details]] = {
            HEALTH_FIELD: lambda: check_health(session, groups, gpu_ids),
            P2P_FIELD: lambda: read_p2p(session, gpu_ids),
        }
        found: dict[int, tuple[Detail, ...]] = {}
        self.details, self.errors = {}, {}
        for field_id, read in reads.items():
            if field_id not in wanted:
                continue
            try:
                for gpu, details in read().items():
                    found[gpu] = (*found.get(gpu, ()), *details)
            except DriverGone:
                raise
            except SourceError as e:
                self.errors[field_id] = e
        self.details = found
