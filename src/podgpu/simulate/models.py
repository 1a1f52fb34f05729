"""This module lists the GPU models that can be simulated: what each part has, and what it has not.

The H200's figures are what a real one answered (MIG sizes apart: it was captured with MIG off). The other parts'
are plausible, not measured: what matters here is that a T4 has no MIG, an L40S no memory temperature, an A100 no GPM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB = 1024**2

VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL = 5, 6, 7, 8, 9, 10
"""NVML's architecture numbers; later parts have larger ones."""

_TESLA, _GEFORCE, _RTX, _NVIDIA = 2, 5, 13, 14
"""NVML's brand numbers."""


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One kind of GPU instance. Slices are what instances compete for: both sums must fit the part."""

    name: str
    compute_slices: int
    memory_slices: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What every GPU of one product has in common."""

    name: str
    """As nvmlDeviceGetName spells it."""
    architecture: int
    compute_capability: tuple[int, int]
    memory: int
    reserved: int
    sm_clock: tuple[int, int]
    """MHz: idle, highest boost."""
    memory_clock: tuple[int, int]
    video_clock: tuple[int, int]
    power: tuple[int, int, int]
    """Watts: idle, lowest limit, highest limit (which is also the default)."""
    multiprocessors: int
    pci_device: int
    pcie_generation: int
    bar1: int
    idle_pstate: int = 0
    """The H200 was seen to stay in P0 when idle; parts without HBM are taken to fall back to P8."""
    brand: int = _NVIDIA
    hbm: bool = False
    ecc: bool = True
    fan: bool = False
    nvlinks: int = 0
    profiles: tuple[MigProfile, ...] = ()
    compute_slices: int = 7
    memory_slices: int = 8

    @property
    def gpm(self) -> bool:
        return self.architecture >= HOPPER

    @property
    def row_remapping(self) -> bool:
        """Ampere replaced page retirement by row remapping."""
        return self.ecc and self.architecture >= AMPERE

    @property
    def page_retirement(self) -> bool:
        return self.ecc and self.architecture < AMPERE

    @property
    def margin_temperature(self) -> bool:
        return self.architecture >= ADA

    @property
    def application_clocks(self) -> bool:
        return self.brand != _GEFORCE

    def profile(self, name: str) -> MigProfile | None:
        return next((profile for profile in self.profiles if profile.name == name), None)


def _profiles(*rows: tuple[str, int, int, int]) -> tuple[MigProfile, ...]:
    return tuple(MigProfile(*row) for row in rows)


_A100_40 = _profiles(
    ("1g.5gb", 1, 1, 4864),
    ("1g.10gb", 1, 2, 9856),
    ("2g.10gb", 2, 2, 9856),
    ("3g.20gb", 3, 4, 19968),
    ("4g.20gb", 4, 4, 19968),
    ("7g.40gb", 7, 8, 40192),
)
_A100_80 = _profiles(
    ("1g.10gb", 1, 1, 9728),
    ("1g.20gb", 1, 2, 19968),
    ("2g.20gb", 2, 2, 19968),
    ("3g.40gb", 3, 4, 40192),
    ("4g.40gb", 4, 4, 40192),
    ("7g.80gb", 7, 8, 80896),
)
_A30 = _profiles(
    ("1g.6gb", 1, 1, 5952),
    ("2g.12gb", 2, 2, 11968),
    ("4g.24gb", 4, 4, 24000),
)
_H100 = _profiles(
    ("1g.10gb", 1, 1, 9984),
    ("1g.20gb", 1, 2, 20096),
    ("2g.20gb", 2, 2, 20096),
    ("3g.40gb", 3, 4, 40448),
    ("4g.40gb", 4, 4, 40448),
    ("7g.80gb", 7, 8, 81152),
)
_H200 = _profiles(
    ("1g.18gb", 1, 1, 16384),
    ("1g.35gb", 1, 2, 33280),
    ("2g.35gb", 2, 2, 33280),
    ("3g.71gb", 3, 4, 71168),
    ("4g.71gb", 4, 4, 71168),
    ("7g.141gb", 7, 8, 142848),
)
_B200 = _profiles(
    ("1g.23gb", 1, 1, 21248),
    ("1g.45gb", 1, 2, 44032),
    ("2g.45gb", 2, 2, 44032),
    ("3g.90gb", 3, 4, 90112),
    ("4g.90gb", 4, 4, 90112),
    ("7g.180gb", 7, 8, 182272),
)

_A100 = GpuModel(
    name="NVIDIA A100-SXM4-40GB",
    architecture=AMPERE,
    compute_capability=(8, 0),
    memory=40960 * MIB,
    reserved=573 * MIB,
    sm_clock=(210, 1410),
    memory_clock=(1215, 1215),
    video_clock=(585, 1290),
    power=(52, 100, 400),
    multiprocessors=108,
    pci_device=0x20B010DE,
    pcie_generation=4,
    bar1=65536 * MIB,
    hbm=True,
    nvlinks=12,
    profiles=_A100_40,
)

MODELS: dict[str, GpuModel] = {
    "V100": GpuModel(
        name="Tesla V100-SXM2-16GB",
        architecture=VOLTA,
        compute_capability=(7, 0),
        memory=16384 * MIB,
        reserved=225 * MIB,
        sm_clock=(135, 1530),
        memory_clock=(877, 877),
        video_clock=(555, 1372),
        power=(42, 150, 300),
        multiprocessors=80,
        pci_device=0x1DB110DE,
        pcie_generation=3,
        bar1=16384 * MIB,
        brand=_TESLA,
        hbm=True,
        nvlinks=6,
    ),
    "T4": GpuModel(
        name="Tesla T4",
        architecture=TURING,
        compute_capability=(7, 5),
        memory=15360 * MIB,
        reserved=449 * MIB,
        sm_clock=(300, 1590),
        memory_clock=(405, 5001),
        video_clock=(540, 1470),
        power=(10, 60, 70),
        multiprocessors=40,
        pci_device=0x1EB810DE,
        pcie_generation=3,
        bar1=256 * MIB,
        idle_pstate=8,
        brand=_TESLA,
    ),
    "A10": GpuModel(
        name="NVIDIA A10",
        architecture=AMPERE,
        compute_capability=(8, 6),
        memory=23028 * MIB,
        reserved=512 * MIB,
        sm_clock=(210, 1695),
        memory_clock=(405, 6251),
        video_clock=(555, 1500),
        power=(16, 100, 150),
        multiprocessors=72,
        pci_device=0x223610DE,
        pcie_generation=4,
        bar1=32768 * MIB,
        idle_pstate=8,
    ),
    "A30": GpuModel(
        name="NVIDIA A30",
        architecture=AMPERE,
        compute_capability=(8, 0),
        memory=24576 * MIB,
        reserved=512 * MIB,
        sm_clock=(210, 1440),
        memory_clock=(1215, 1215),
        video_clock=(585, 1305),
        power=(29, 100, 165),
        multiprocessors=56,
        pci_device=0x20B710DE,
        pcie_generation=4,
        bar1=32768 * MIB,
        hbm=True,
        nvlinks=4,
        profiles=_A30,
        compute_slices=4,
        memory_slices=4,
    ),
    "A100": _A100,
    "A100-80GB": replace(
        _A100,
        name="NVIDIA A100-SXM4-80GB",
        memory=81920 * MIB,
        reserved=603 * MIB,
        memory_clock=(1593, 1593),
        pci_device=0x20B210DE,
        bar1=131072 * MIB,
        profiles=_A100_80,
    ),
    "L4": GpuModel(
        name="NVIDIA L4",
        architecture=ADA,
        compute_capability=(8, 9),
        memory=23034 * MIB,
        reserved=512 * MIB,
        sm_clock=(210, 2040),
        memory_clock=(405, 6251),
        video_clock=(765, 1770),
        power=(16, 40, 72),
        multiprocessors=58,
        pci_device=0x27B810DE,
        pcie_generation=4,
        bar1=32768 * MIB,
        idle_pstate=8,
    ),
    "L40S": GpuModel(
        name="NVIDIA L40S",
        architecture=ADA,
        compute_capability=(8, 9),
        memory=46068 * MIB,
        reserved=642 * MIB,
        sm_clock=(210, 2520),
        memory_clock=(405, 9001),
        video_clock=(1185, 1965),
        power=(34, 100, 350),
        multiprocessors=142,
        pci_device=0x26B910DE,
        pcie_generation=4,
        bar1=65536 * MIB,
        idle_pstate=8,
    ),
    "RTX6000-Ada": GpuModel(
        name="NVIDIA RTX 6000 Ada Generation",
        architecture=ADA,
        compute_capability=(8, 9),
        memory=49140 * MIB,
        reserved=642 * MIB,
        sm_clock=(210, 3105),
        memory_clock=(405, 10001),
        video_clock=(1185, 2415),
        power=(21, 100, 300),
        multiprocessors=142,
        pci_device=0x26B110DE,
        pcie_generation=4,
        bar1=65536 * MIB,
        idle_pstate=8,
        brand=_RTX,
        fan=True,
    ),
    "RTX4090": GpuModel(
        name="NVIDIA GeForce RTX 4090",
        architecture=ADA,
        compute_capability=(8, 9),
        memory=24564 * MIB,
        reserved=346 * MIB,
        sm_clock=(210, 3105),
        memory_clock=(405, 10501),
        video_clock=(1185, 2415),
        power=(15, 150, 450),
        multiprocessors=128,
        pci_device=0x268410DE,
        pcie_generation=4,
        bar1=32768 * MIB,
        idle_pstate=8,
        brand=_GEFORCE,
        ecc=False,
        fan=True,
    ),
    "H100": GpuModel(
        name="NVIDIA H100 80GB HBM3",
        architecture=HOPPER,
        compute_capability=(9, 0),
        memory=81559 * MIB,
        reserved=551 * MIB,
        sm_clock=(345, 1980),
        memory_clock=(2619, 2619),
        video_clock=(765, 1545),
        power=(70, 200, 700),
        multiprocessors=132,
        pci_device=0x233010DE,
        pcie_generation=5,
        bar1=131072 * MIB,
        hbm=True,
        nvlinks=18,
        profiles=_H100,
    ),
    "H200": GpuModel(
        name="NVIDIA H200",
        architecture=HOPPER,
        compute_capability=(9, 0),
        memory=150754820096,
        reserved=644939776,
        sm_clock=(345, 1980),
        memory_clock=(3201, 3201),
        video_clock=(765, 1545),
        power=(77, 200, 700),
        multiprocessors=132,
        pci_device=0x233510DE,
        pcie_generation=5,
        bar1=262144 * MIB,
        hbm=True,
        nvlinks=18,
        profiles=_H200,
    ),
    "B200": GpuModel(
        name="NVIDIA B200",
        architecture=BLACKWELL,
        compute_capability=(10, 0),
        memory=183359 * MIB,
        reserved=735 * MIB,
        sm_clock=(120, 1965),
        memory_clock=(3996, 3996),
        video_clock=(825, 1515),
        power=(140, 200, 1000),
        multiprocessors=148,
        pci_device=0x290110DE,
        pcie_generation=6,
        bar1=262144 * MIB,
        hbm=True,
        nvlinks=18,
        profiles=_B200,
    ),
}
