"""Whoever says who holds what: the kubelet, its checkpoint, schedulers' annotations, koordinator's list, HPC jobs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from endurance.fuzz.mutate import NUMBERS, Case, Make, blobs, documents, either, texts
from endurance.fuzz.target import Target
from podgpu.errors import SourceError
from podgpu.holders import annotation_formats as formats
from podgpu.holders import podresources_pb2
from podgpu.holders.annotation_formats import is_read, parse_slots, read_grants
from podgpu.holders.annotations import AnnotationsAllocation
from podgpu.holders.checkpoint import map_checkpoint, parse_checkpoint
from podgpu.holders.device_ids import DeviceIndex, parse_device_id
from podgpu.holders.dra import DraClaims, parse_claims
from podgpu.holders.dra_claims import parse_driver_checkpoint
from podgpu.holders.hpack import BadHeaders, HeaderDecoder, decode_huffman, encode_headers
from podgpu.holders.hpc import LONGEST_JOB, map_jobs, parse_jobs
from podgpu.holders.identity import parse_container_log, parse_pod_directory
from podgpu.holders.kubelet import parse_assignments
from podgpu.holders.pod_resources import decode_list
from podgpu.holders.podlist import map_podlist, parse_gpu, parse_mount_points, parse_podlist
from podgpu.kube.objects import parse_pod, parse_quantity, parse_slice
from podgpu.model import Allocation, Device

GPU_A, GPU_B = "GPU-11111111-2222-3333-4444-555555555555", "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
MIG_A = "MIG-99999999-8888-7777-6666-555555555555"
DEVICES = (
    Device(0, GPU_A, "00000000:0A:00.0", "NVIDIA H100", 0),
    Device(1, GPU_B, "00000000:0B:00.0", "NVIDIA H100", 1, mig_enabled=True),
    Device(1, GPU_B, "00000000:0B:00.0", "NVIDIA H100", 1, True, 7, "1g.10gb", (MIG_A,)),
)
_KEYS = {device.key for device in DEVICES}
IDS = (
    *(GPU_A, GPU_B, MIG_A, f"{GPU_A}::0", f"{GPU_A}::1", f"MIG-{GPU_B}/7/0", "nvidia0", "nvidia1/gi7", "nvidia0/vgpu3"),
    *("all", "tegra", "0", "1", "tencent.com/vcuda-core-3", "tencent.com/vcuda-memory-268435456-7", "nvidia00"),
)
_FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "kubelet-1.36"


def _check(found: Allocation) -> object:
    """Only devices that are there; each holder of a device once; a share is a part."""
    for assignment in found.assignments:
        assert assignment.device in _KEYS, "a device that is not there is held"
        assert assignment.share is None or 0 < assignment.share <= 1, "a share that is no part"
        "".join(
            (assignment.holder.namespace, assignment.holder.pod, assignment.holder.container, assignment.device)
        ).encode()
    pairs = [(assignment.device, assignment.holder) for assignment in found.assignments]
    assert len(set(pairs)) == len(pairs), "one holder holds one device twice"
    return found.assignments or None


def device_id(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_device_id(case)
    for device in () if found is None else DeviceIndex(DEVICES).find(found):
        assert device in DEVICES
    parse_gpu(case)
    return found


def podlist(case: Case) -> object:
    assert isinstance(case, bytes)
    return _check(map_podlist(parse_podlist(case), DEVICES))


def checkpoint(case: Case) -> object:
    assert isinstance(case, bytes)
    return _check(map_checkpoint(parse_checkpoint(case), DEVICES))


def kubelet(case: Case) -> object:
    assert isinstance(case, bytes)
    answer = decode_list(case)
    list(parse_claims(answer))
    by_claim = DraClaims(_SLICES).held(answer, DEVICES)
    _check(by_claim)
    return _check(parse_assignments(answer, DEVICES)) or by_claim.assignments or None


def jobs(case: Case) -> object:
    assert isinstance(case, bytes)
    found = parse_jobs(case)
    assert len(set(found.jobs)) == len(found.jobs)
    assert all(0 < len(job) <= LONGEST_JOB and job.isprintable() for job in found.jobs)
    map_jobs({"0": found}, DEVICES)
    return found.jobs or None


class _Feed:
    """What a watcher of the API server holds."""

    synced, error = True, None

    def __init__(self, things: tuple[Any, ...]) -> None:
        self._things = things

    def items(self) -> tuple[Any, ...]:
        return self._things


def pod_annotations(case: Case) -> object:
    """As a pod of the API that says so; a bad annotation costs the pod its devices and raises nothing further up."""
    assert isinstance(case, bytes)
    try:
        pod = parse_pod(json.loads(case), is_read)
    except (ValueError, RecursionError):
        return None
    if pod is None:
        return None
    feed = _Feed((pod,))
    _check(AnnotationsAllocation(lambda: feed).assignments(DEVICES))
    return read_grants(pod) or None


def slots(case: Case) -> object:
    assert isinstance(case, str)
    return parse_slots(case) or None


def quantity(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_quantity(case)
    assert found >= 0
    float(found)
    return found


def driver_checkpoint(case: Case) -> object:
    assert isinstance(case, bytes)
    found = parse_driver_checkpoint(case)
    repr(found.uuids).encode()
    return found.uuids or found.admin or None


def resource_slice(case: Case) -> object:
    assert isinstance(case, bytes)
    try:
        body = json.loads(case)
    except (ValueError, RecursionError):
        return None
    found = parse_slice(body) if isinstance(body, dict) else None
    if found is None:
        return None
    answer = podresources_pb2.ListPodResourcesResponse()
    claim = answer.pod_resources.add(name="p", namespace="n").containers.add(name="c").dynamic_resources.add()
    claim.claim_resources.add(driver_name="gpu.nvidia.com", pool_name="node-1", device_name="gpu-0")
    return _check(DraClaims(_Feed((found, found))).held(answer, DEVICES))


# What good input looks like


def _resources(*requests: tuple[str, str]) -> dict[str, Any]:
    return {"resources": {"limits": dict(requests)}}


def _pod(annotated: dict[str, str], *requests: tuple[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": annotated, "labels": {"a/b": "c"}},
        "spec": {
            "nodeName": "node-1",
            "initContainers": [{"name": "i", **_resources(*requests)}],
            "containers": [{"name": "c", **_resources(*requests)}, {"name": "d"}],
        },
        "status": {
            "phase": "Running",
            "initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}],
            "containerStatuses": [{"name": "c", "containerID": "containerd://" + "a" * 64}],
        },
    }


_KOORDINATOR = json.dumps(
    {"gpu": [{"minor": 0, "id": GPU_A, "resources": {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory": 8}}]}
)
_HAMI = f";{GPU_A},NVIDIA,4096,30:;{GPU_B},NVIDIA,0,0:;"
_HAMI_MIG = json.dumps([{"containerIndex": 1, "deviceIndex": 0, "gpuUUID": GPU_A, "migUUID": MIG_A}])
PODS = (
    _pod({formats.KOORDINATOR_DEVICES: _KOORDINATOR}, ("koordinator.sh/gpu-core", "50")),
    _pod({formats.HAMI_DEVICES: _HAMI, formats.HAMI_MIG_DEVICES: _HAMI_MIG}, ("nvidia.com/gpu", "1")),
    _pod({formats.HAMI_1_DEVICES: f"{GPU_A},NVIDIA,100,10:;"}, ("nvidia.com/gpu", "1")),
    _pod({formats.VOLCANO_DEVICES: _HAMI}, ("volcano.sh/vgpu-number", "1")),
    _pod(
        {formats.GPU_MANAGER_ASSIGNED: "true", formats.GPU_MANAGER_CARDS + "0": "0,1"},
        ("tencent.com/vcuda-core", "200"),
        ("tencent.com/vcuda-memory", "8"),
    ),
)
_SLICE = {
    "metadata": {"name": "s"},
    "spec": {
        "driver": "gpu.nvidia.com",
        "pool": {"name": "node-1", "generation": 1},
        "devices": [
            {"name": "gpu-0", "basic": {"attributes": {"type": {"string": "gpu"}, "uuid": {"string": GPU_A}}}},
            {"name": "mig", "attributes": {"gpu.nvidia.com/uuid": {"string": MIG_A}, "type": {"string": "mig"}}},
        ],
    },
}
_GPU_0 = {"PoolName": "node-1", "DeviceName": "gpu-0"}
_PREPARED = {
    "checkpointState": "PrepareCompleted",
    "namespace": "n",
    "name": "c",
    "status": {
        "allocation": {
            "devices": {
                "results": [{"driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-0", "adminAccess": True}]
            }
        }
    },
    "preparedDevices": [
        {"devices": [{"gpu": {"info": {"uuid": GPU_A}, "device": _GPU_0}, "mig": None}]},
        {"devices": [{"mig": {"concrete": {"migUUID": MIG_A}, "device": _GPU_0}}]},
    ],
}
_DRIVER_CHECKPOINT = {"checksum": 1, "v1": None, "v2": {"preparedClaims": {"u": _PREPARED}}}
_SLICES = _Feed((parse_slice(_SLICE),))
_PODLIST = [{"namespace": "n", "name": "p", "container": "c", "gpu_list": ["0", GPU_B, "nvidia1"]}]
_CHECKPOINT = json.loads((_FIXTURES / "kubelet_internal_checkpoint").read_bytes())
_SMALL_CHECKPOINT = {
    "Data": {
        "PodDeviceEntries": [
            {
                "PodUID": "u",
                "ContainerName": "c",
                "ResourceName": "nvidia.com/gpu",
                "DeviceIDs": {"0": [f"{GPU_A}::0"], "-1": [GPU_B]},
            }
        ],
        "RegisteredDevices": {"nvidia.com/gpu": [f"{GPU_A}::0", f"{GPU_A}::1", GPU_B]},
    },
    "Checksum": 1,
}


def _message(rng: Random) -> bytes:
    """A List answer put together from names that mean something, and from ones that do not."""
    answer = podresources_pb2.ListPodResourcesResponse()
    for _ in range(rng.randrange(4)):
        pod = answer.pod_resources.add(name=_word(rng), namespace=_word(rng))
        container = pod.containers.add(name=_word(rng))
        for _ in range(rng.randrange(3)):
            resource = rng.choice(("nvidia.com/gpu", "nvidia.com/gpu.shared", "tencent.com/vcuda-core", _word(rng)))
            ids = rng.choices((*IDS, _word(rng)), k=rng.randrange(5))
            container.devices.add(resource_name=resource, device_ids=ids)
        for _ in range(rng.randrange(2)):
            claim = container.dynamic_resources.add(claim_name=_word(rng), claim_namespace=_word(rng))
            driver = rng.choice(("gpu.nvidia.com", "", _word(rng)))
            one = claim.claim_resources.add(
                driver_name=driver, pool_name="node-1", device_name=rng.choice(("gpu-0", ""))
            )
            one.cdi_devices.add(name=rng.choice((f"nvidia.com/gpu={GPU_A}", "k8s.gpu.nvidia.com/claim=x", _word(rng))))
    return bytes(answer.SerializeToString())


def _word(rng: Random) -> str:
    return rng.choice(("", "p", "ns", "é", "\n", "x" * 300, *NUMBERS[:6]))


_MESSAGES = [_message(Random(number)) for number in range(40)] + [(_FIXTURES / "podresources-v1-list.bin").read_bytes()]
_MAKE_MESSAGE: Make = either(_message, blobs(_MESSAGES))
_LOGS = (
    "ns_pod_11111111-2222-3333-4444-555555555555",
    "ns_static-node_0123456789abcdef0123456789abcdef",
    f"pod_ns_container-{'a' * 64}.log",
)


def log_names(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_pod_directory(case) or parse_container_log(case)
    if found is not None:
        assert all((found.namespace, found.pod)), "a name that names nobody"
    return found


_HEADER_BLOCKS = [
    encode_headers([(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "0")]),
    bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff"),  # RFC 7541, C.4.1: with Huffman's code
    bytes.fromhex(
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82"
    ),
]


def headers(case: Case) -> object:
    """One connection: what one block put into the table, the next may name."""
    block = case if isinstance(case, bytes) else str(case).encode()
    decoder = HeaderDecoder()
    found = [*decoder.decode(block), *decoder.decode(block)]
    for name, value in found:
        assert isinstance(name, str), "a name that is no text"
        assert isinstance(value, str), "a value that is no text"
    decode_huffman(b"")
    return found


HOLDER_TARGETS = (
    Target("device-ids", texts(IDS), device_id),
    Target("kubelet-answer", _MAKE_MESSAGE, kubelet),
    Target("kubelet-headers", blobs(_HEADER_BLOCKS), headers, (BadHeaders,)),
    Target("checkpoint", documents([_SMALL_CHECKPOINT, _SMALL_CHECKPOINT, _CHECKPOINT], IDS), checkpoint),
    Target("koordinator-podlist", documents([_PODLIST], IDS), podlist),
    Target("annotations", documents(PODS, (*IDS, _HAMI, _KOORDINATOR)), pod_annotations, (SourceError,)),
    Target("hami-slots", texts([_HAMI, f"{GPU_A},NVIDIA,1,1:"], IDS), slots, (ValueError,)),
    Target("quantities", texts(["50", "500m", "8Gi", "1e3", "+1.5k", ".5"]), quantity, (ValueError,)),
    Target("resource-slices", documents([_SLICE], IDS), resource_slice),
    Target("dra-driver-checkpoint", documents([_DRIVER_CHECKPOINT], IDS), driver_checkpoint),
    Target("hpc-jobs", blobs([b"1234\n1235\n", b"job[1]\n\n", b"a" * 300]), jobs),
    Target("log-names", texts(_LOGS, ("_", "-", ".log")), log_names),
    Target(
        "mount-points",
        blobs([b"36 35 98:0 / /a\\040b rw - ext4 /dev/x rw\n"]),
        lambda c: parse_mount_points(_b(c)) or None,
    ),
)


def _b(case: Case) -> bytes:
    assert isinstance(case, bytes)
    return case
