"""Prometheus' own checker over golden outputs: they parse, and lint finds no fault with podgpu's own families."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NODES = Path(__file__).parent / "nodes"
PROMTOOL = shutil.which("promtool")
_OF_LABELS = "label names should be written in 'snake_case'"
"""Devices carry the labels of the DCGM series, and `modelName` is dcgm-exporter's spelling."""
PARSES = (0, 3)
"""Exit codes: fine, and lint findings. 1 is a parse error."""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here; on Debian: apt-get install prometheus")
@pytest.mark.parametrize("scenario", ["pod-mapped", "mig", "faulty", "escaping"])
def test_promtool_check_metrics(scenario: str) -> None:
    """dcgm-exporter's names break the rules (upper case, counters without _total); those are not ours to choose."""
    text = (NODES / scenario / "expected.prom").read_bytes()
    checked = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, timeout=60)
    findings = (checked.stdout + checked.stderr).decode()
    assert checked.returncode in PARSES, findings
    assert [line for line in findings.splitlines() if "podgpu_" in line and _OF_LABELS not in line] == []


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here; on Debian: apt-get install prometheus")
def test_usage_families_have_no_fault_but_dcgm_exporters_label() -> None:
    """What containers use carries the device labels of the DCGM series, and `modelName` is dcgm-exporter's spelling."""
    text = (NODES / "usage-time-sliced" / "expected.prom").read_bytes()
    checked = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, timeout=60)
    findings = (checked.stdout + checked.stderr).decode()
    assert checked.returncode in PARSES, findings
    ours = {line.partition(" ")[2] for line in findings.splitlines() if line.startswith("podgpu_")}
    assert ours == {f"{_OF_LABELS} not 'camelCase'"}
