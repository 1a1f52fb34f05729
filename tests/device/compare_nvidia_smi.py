"""Compares podgpu's values with nvidia-smi's on a real GPU under load. Needs PyTorch and takes half
a minute:

    python tests/device/compare_nvidia_smi.py

Reads podgpu between two readings of nvidia-smi, several times. Prints the three means of each
value. Exits 1 if a value of podgpu is outside the two values of nvidia-smi more than once.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import urllib.request

LOAD = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    began = time.monotonic()
    while time.monotonic() - began < 0.05:
        a @ a
        torch.cuda.synchronize()
    time.sleep(0.05)
"""
# metric -> column of nvidia-smi, and tolerance for changes between two readings
COLUMNS = {
    "DCGM_FI_DEV_SM_CLOCK": ("clocks.sm", 200),
    "DCGM_FI_DEV_MEM_CLOCK": ("clocks.mem", 1),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature.gpu", 2),
    "DCGM_FI_DEV_MEMORY_TEMP": ("temperature.memory", 2),
    "DCGM_FI_DEV_POWER_USAGE": ("power.draw", 60),
    "DCGM_FI_DEV_GPU_UTIL": ("utilization.gpu", 20),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("utilization.memory", 10),
    "DCGM_FI_DEV_FB_USED": ("memory.used", 2),
    "DCGM_FI_DEV_FB_FREE": ("memory.free", 2),
    "DCGM_FI_DEV_FB_RESERVED": ("memory.reserved", 2),
}
ROUNDS = 8


def main() -> int:
    options = ["-f", "dcp", "-c", "1000", "-a", "127.0.0.1:9400"]
    with (
        subprocess.Popen([sys.executable, "-c", LOAD]) as load,
        subprocess.Popen([sys.executable, "-m", "podgpu", "exporter", *options]) as exporter,
    ):
        try:
            time.sleep(15)  # the load compiles and warms up
            return compare()
        finally:
            exporter.terminate()
            load.kill()


def read_podgpu() -> dict[str, float]:
    with urllib.request.urlopen("http://127.0.0.1:9400/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("DCGM_")
    }


def read_nvidia_smi() -> dict[str, float]:
    columns = sorted(column for column, _ in COLUMNS.values())
    text = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    return dict(zip(columns, map(float, text.split(",")), strict=True))


def compare() -> int:
    rounds = []
    for _ in range(ROUNDS):
        before = read_nvidia_smi()
        time.sleep(1.1)  # longer than the interval of podgpu's readings
        rounds.append((read_podgpu(), before, read_nvidia_smi()))
    wrong = 0
    for name, (column, slack) in COLUMNS.items():
        rows = [
            (ours[name], before[column], after[column])
            for ours, before, after in rounds
            if name in ours
        ]
        inside = sum(min(b, a) - slack <= ours <= max(b, a) + slack for ours, b, a in rows)
        is_right = inside >= ROUNDS - 1
        wrong += not is_right
        means = "".join(f"{statistics.fmean(values):>12.1f}" for values in zip(*rows, strict=True))
        print(f"{name:<28}{means}   {inside}/{ROUNDS} {'ok' if is_right else 'OUTSIDE'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
