"""Opening decides how well a GPU's context switches may be read here, and opens the log: with busy samples or without.

The busy register is read only on architectures where somebody has measured that it tells the truth, and only with
CAP_SYS_ADMIN: asked without it, the driver refuses and writes a line into the kernel's log each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from podgpu.gpu.nvml.switches.listener import Listener, SwitchLog
from podgpu.gpu.nvml.switches.records import Doubt
from podgpu.gpu.nvml.switches.resource_manager import ContextSwitchLog, layout_of
from podgpu.model import Device, UsageMethod

OpenLog = Callable[[Device, str], SwitchLog]
"""From a GPU and the driver's version; raises Doubt."""
_CAP_SYS_ADMIN = 21
_WHOLE_MACHINE = "0 0 4294967295"


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    lead_ns: int
    """Of every stay on the engine, how long nothing is worked on: restoring and saving the context."""
    slice_work_ns: int = 0
    """What is worked in a stay that ended because its time slice was over; 0 where nobody has looked."""


MEASURED = {9: Architecture("Hopper (GH100)", lead_ns=64_000, slice_work_ns=2_055_000)}
"""NVML's number of the architecture -> what was measured there. H200, driver 580: stays of known work are 63 to 67 µs
longer than it, in seven traces of 2,800 to 53,000 switches; the busy bit agrees with NVML's utilisation to a point.
Kernels that write down when they run, in 4,400 slices: all are stopped 2,100 µs after the switch-in, begin 21 to 52 µs
after it, and are saved in 68 µs (a warp on each processor) to 107 (all of its memory in use); 121 was seen of PyTorch.
"""


@dataclass(frozen=True, slots=True)
class Outlook:
    """How well a GPU would be told apart if containers shared it, and what keeps it from being told better."""

    wanted: UsageMethod
    driver_version: str
    architecture: int | None
    """NVML's number; None where it does not tell, and on a GPU cut by MIG, where nothing was measured."""
    privileged: bool
    unsampled: str
    """Why no busy samples would be taken, in words."""
    doubt: Doubt | None = None
    """Why its log cannot be had."""

    @property
    def method(self) -> UsageMethod:
        if self.wanted == "samples" or self.doubt is not None:
            return "samples"
        return "switches" if self.unsampled else "exact"


@dataclass(frozen=True, slots=True)
class Opening:
    """What `--usage-from` asks for and what this process may do."""

    wanted: UsageMethod = "samples"
    open_log: OpenLog = field(default_factory=lambda: open_switch_log)
    privileged: Callable[[], bool] = field(default_factory=lambda: has_sys_admin)
    listen: Callable[..., Listener] = Listener

    def listener(
        self, device: Device, driver_version: str, architecture: int | None, wall: Callable[[], float]
    ) -> Listener:
        """Raises Doubt where the log cannot be had."""
        known = MEASURED.get(architecture or 0) or Architecture("unknown", lead_ns=0)
        log = self.open_log(device, driver_version)
        return self.listen(
            log,
            sampled=not self.why_unsampled(architecture),
            lead=known.lead_ns,
            slice_work=known.slice_work_ns,
            wall=wall,
        )

    def outlook(self, device: Device, driver_version: str, architecture: int | None) -> Outlook:
        """Found out by opening the log for a moment, where it is wanted."""
        doubt = None
        if self.wanted != "samples":
            try:
                self.open_log(device, driver_version).close()
            except Doubt as e:
                doubt = e
        why = self.why_unsampled(architecture)
        return Outlook(self.wanted, driver_version, architecture, self.privileged(), why, doubt)

    def why_unsampled(self, architecture: int | None) -> str:
        """Why no busy samples are taken, in words; empty when they are."""
        if self.wanted != "exact":
            return f"--usage-from is {self.wanted}"
        if architecture not in MEASURED:
            measured = ", ".join(known.name for known in MEASURED.values())
            return f"nobody has measured the busy register on this architecture yet (measured: {measured})"
        return "" if self.privileged() else "CAP_SYS_ADMIN is missing (chart: exporter.usage.from: exact adds it)"


def open_switch_log(device: Device, driver_version: str) -> SwitchLog:
    """The kernel driver's own."""
    minor = (device.index or 0) if device.minor is None else device.minor
    return ContextSwitchLog(device.pci_bus_id, minor, layout_of(driver_version))


def has_sys_admin(proc: Path = Path("/proc/self")) -> bool:
    """In the machine's own user namespace, which is the one the driver asks about."""
    try:
        status = (proc / "status").read_text()
        uids = (proc / "uid_map").read_text()
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1) and " ".join(uids.split()) == _WHOLE_MACHINE
