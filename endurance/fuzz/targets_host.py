"""Files of the host: /proc, cgroups, the kernel's word on the driver, profiles, version texts."""

from __future__ import annotations

from endurance.fuzz.mutate import Case, blobs, texts
from endurance.fuzz.target import Target
from podgpu.doctor.host import parse_kernel_driver, parse_status
from podgpu.errors import UsageError
from podgpu.fetch.exposition import looks_like_web_page
from podgpu.gpu.dcgm.connection import parse_version
from podgpu.gpu.dcgm.connection import parse_address
from podgpu.hook.cards import parse_card
from podgpu.metrics.mig import slices_of_profile
from podgpu.simulate.proc import cgroup_text, container_cgroup, stat_line
from podgpu.usage.cgroup import parse_cgroup
from podgpu.usage.containers import parse_started

_UID, _CONTAINER = "11111111-2222-3333-4444-555555555555", "a" * 64
_CGROUPS = [
    container_cgroup(_UID, _CONTAINER, version=version, driver=driver, qos=qos, runtime=runtime)
    for version in (1, 2)
    for driver in ("systemd", "cgroupfs")
    for qos in ("guaranteed", "burstable")
    for runtime in ("containerd", "crio")
] + [cgroup_text("/system.slice/docker-" + _CONTAINER + ".scope"), cgroup_text("/init.scope", 1), "0::/../..\n"]
_STATUS = "Name:\tpython3\nUid:\t0\t65534\t0\t0\nCapEff:\t00000000a80425fb\n"
_INFORMATION = "Model:  \t H100\nGPU UUID: \t GPU-11111111-2222-3333-4444-555555555555\nDevice Minor: \t 3\n"
_KERNEL = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13\n"


def cgroup(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_cgroup(case.encode("utf-8", "replace").decode())
    if found is not None:
        assert len(found.container_id) in range(1, 129)
        assert found.container_id.isalnum(), "no id of a container"
    return found


def started(case: Case) -> object:
    assert isinstance(case, bytes)
    return parse_started(case[:4096])


def status(case: Case) -> object:
    assert isinstance(case, str)
    parse_kernel_driver(case)
    return parse_status(case)


def kernel(case: Case) -> object:
    assert isinstance(case, str)
    return parse_kernel_driver(case) or None


def card(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_card(case)
    assert found.minor is None or 0 <= found.minor < 10**6
    return found if found.uuid or found.minor is not None else None


def slices(case: Case) -> object:
    assert isinstance(case, str)
    number = slices_of_profile(case)
    assert number is None or 0 < number < 100
    return number


def engine(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_address(case)
    assert found.text
    return found


def version(case: Case) -> object:
    assert isinstance(case, bytes)
    looks_like_web_page(case)
    return parse_version(case) or None


HOST_TARGETS = (
    Target("cgroups", texts(_CGROUPS, ("kubepods", ".scope", ".slice", "crio-", ":")), cgroup),
    Target("process-start", blobs([stat_line(42, "a b) (c", 99).encode()], (b")", b" ")), started, (ValueError,)),
    Target("process-status", texts([_STATUS], ("Uid:", "CapEff:")), status),
    Target("kernel-driver", texts([_KERNEL]), kernel),
    Target("gpu-information", texts([_INFORMATION], ("GPU UUID:", "Device Minor:", "??")), card),
    Target("mig-profiles", texts(["1g.10gb", "3g.40gb+me", "7g.80gb", ""]), slices),
    Target("engine-address", texts(["localhost", "h:5555", "[::1]:5555", "unix:///run/x.sock"]), engine, (UsageError,)),
    Target("engine-version", blobs([b"version:4.2.3;arch:x86_64", b"<html>"]), version),
)
