"""Runs promtool, Prometheus' checker, on golden outputs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NODES = Path(__file__).parent / "nodes"
PARSED = (0, 3)  # exit codes: no findings, and lint findings; 1 is a parse error
CAMEL_CASE = (
    "label names should be written in 'snake_case' not 'camelCase'"  # dcgm-exporter's modelName
)

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; on Debian: apt-get install prometheus",
)


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
@pytest.mark.parametrize(
    "scenario", ["pod-mapped", "mig", "faulty", "escaping", "usage-time-sliced"]
)
def test_promtool_check_metrics(scenario: str) -> None:
    """Findings about dcgm-exporter's names are ignored: upper case, counters without _total."""
    text = (NODES / scenario / "expected.prom").read_bytes()
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    findings = (checked.stdout + checked.stderr).decode()
    assert checked.returncode in PARSED, findings
    assert {
        line.partition(" ")[2] for line in findings.splitlines() if line.startswith("podgpu_")
    } <= {CAMEL_CASE}
