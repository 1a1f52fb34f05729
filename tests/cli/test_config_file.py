"""`--config-file` in the real command: precedence, bad files, and the options of 4.8.3 and
4.8.4.
"""

from __future__ import annotations

import re
import signal
import socket as sockets
from collections.abc import Callable
from pathlib import Path

import pytest

from podgpu.metrics.encode import families_in
from podgpu.metrics.parse import parse_text
from tests.cli.test_option_table import Ran, execute
from tests.nodes.clock import wait_until
from tests.process import EXPORTER, has_values, podgpu

QUICK = ["exporter", "--once", "--telemetry", "simulated:1xT4"]
FIELDS = (
    "metrics:\n  fields:\n  - {name: DCGM_FI_DEV_GPU_TEMP, prometheusType: gauge, help: From the "
    "file.}\n"
)
COLLECTIONS = "collections:\n- {name: all, every: 100ms, metrics: {include: ['*']}}\n"
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "config.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def families(ran: Ran) -> set[str]:
    assert ran.code == 0, ran.err
    return set(re.findall(r"^# TYPE (DCGM_\w+)", ran.out, re.MULTILINE))


def test_the_file_goes_before_the_default(write: Write) -> None:
    path = write(f"version: 2\n{FIELDS}{COLLECTIONS}")
    assert families(execute([*QUICK, "--config-file", path])) == {"DCGM_FI_DEV_GPU_TEMP"}
    assert families(execute(QUICK, DCGM_EXPORTER_CONFIG_FILE=path)) == {"DCGM_FI_DEV_GPU_TEMP"}


def test_variable_and_flag_go_before_the_file(write: Write) -> None:
    path = write(f"version: 2\n{FIELDS}{COLLECTIONS}")
    csv = write("DCGM_FI_DEV_SM_CLOCK,gauge,c\n", "c.csv")
    ran = execute([*QUICK, "--config-file", path], DCGM_EXPORTER_COLLECTORS=csv)
    assert families(ran) == {"DCGM_FI_DEV_SM_CLOCK"}
    assert families(execute([*QUICK, "--config-file", path, "-f", csv])) == {"DCGM_FI_DEV_SM_CLOCK"}
    by_none = execute([*QUICK, "--config-file", path, "-m", "none"])
    assert families(by_none) == {"DCGM_FI_DEV_GPU_TEMP"}, "-m none selects the file"


def test_a_counter_file_named_in_it_and_the_message_when_it_is_not_there(write: Write) -> None:
    csv = write("DCGM_FI_DEV_SM_CLOCK,gauge,c\n", "c.csv")
    path = write(f"version: 2\nmetrics: {{file: {csv}}}\n{COLLECTIONS}")
    assert families(execute([*QUICK, "--config-file", path])) == {"DCGM_FI_DEV_SM_CLOCK"}
    Path(csv).unlink()
    ran = execute([*QUICK, "--config-file", path])
    assert ran.code == 2
    assert "does not exist" in ran.complaint
    assert f"(from {path})" in ran.complaint


def test_a_bad_file_is_named(write: Write) -> None:
    text = (
        "version: 2\ncollections:\n- {name: links, every: 2s, metrics: {include: "
        "[DCGM_FI_DEV_NVLINK_FOO]}}\n"
    )
    ran = execute([*QUICK, "--config-file", write(text)])
    assert (ran.code, ran.out) == (2, "")
    for name in ("config.yaml: collections[0]", "links", "no configured field matches"):
        assert name in ran.complaint


def test_what_does_nothing_here_is_said(write: Write) -> None:
    path = write("version: 2\nsources: {dcgm: {detectBindUnbind: {enabled: true}}}\n" + COLLECTIONS)
    ran = execute([*QUICK, "--config-file", path])
    assert ran.code == 0
    assert f"{path}: sources has no effect" in ran.err


@pytest.mark.reads_host("what the process itself is, from /proc/self: there is no other to read")
def test_process_metrics_are_right_and_only_there_when_asked_for(write: Write) -> None:
    quick = [*QUICK, "-c", "100"]
    assert "process_" not in execute(quick).out
    path = write("version: 2\nmetrics: {enableExporterMetrics: true}\n")
    for ran in (
        execute([*quick, "--enable-exporter-metrics"]),
        execute([*quick, "--config-file", path]),
    ):
        exposition = {f.name: f for f in parse_text(ran.out)}
        for spec in families_in("process").values():
            assert exposition[spec.name].type == spec.type
        values = {
            f.name: f.samples[0].value for f in exposition.values() if f.name.startswith("process_")
        }
        assert values["process_cpu_seconds_total"] > 0
        assert (
            1e6 < values["process_resident_memory_bytes"] < values["process_virtual_memory_bytes"]
        )
        assert 3 <= values["process_open_fds"] <= values["process_max_fds"]
        assert 1_600_000_000 < values["process_start_time_seconds"] < 4_000_000_000
    off = execute([*quick, "--config-file", path, "--enable-exporter-metrics=false"])
    assert "process_" not in off.out


def test_a_visitor_who_does_not_send_is_let_go(tmp_path: Path) -> None:
    with podgpu((*EXPORTER, "--web-read-timeout", "300ms"), tmp_path) as exporter:
        with sockets.create_connection(("127.0.0.1", exporter.port), timeout=20) as silent:
            silent.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert silent.recv(100) == b""
        assert exporter.client.ask("/livez").status == 200


def test_the_counter_file_it_names_is_followed_on_sighup(tmp_path: Path, write: Write) -> None:
    csv = tmp_path / "counters.csv"
    csv.write_text(
        "DCGM_FI_DEV_GPU_TEMP,gauge,t\nDCGM_FI_DEV_POWER_USAGE,gauge,w\n", encoding="utf-8"
    )
    quick = (
        "collections:\n- {name: quick, every: 200ms, metrics: {include: "
        "[DCGM_FI_DEV_POWER_USAGE]}}\n"
    )
    path = write(f"version: 2\nmetrics: {{file: {csv}}}\n{quick}")
    arguments = (*EXPORTER, "--config-file", path, "--allocation-interval", "1h")
    with podgpu(arguments, tmp_path, has_values) as exporter:
        assert exporter.series("DCGM_FI_DEV_POWER_USAGE")
        csv.write_text(
            "DCGM_FI_DEV_POWER_USAGE,gauge,w\nDCGM_FI_DEV_SM_CLOCK,gauge,c\n", encoding="utf-8"
        )
        exporter.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: exporter.series("DCGM_FI_DEV_SM_CLOCK"), "the new counters")
        assert exporter.series("DCGM_FI_DEV_POWER_USAGE")
        assert not exporter.series("DCGM_FI_DEV_GPU_TEMP")
        csv.write_text("DCGM_FI_DEV_SM_CLOCK,gauge,c\n", encoding="utf-8")
        exporter.popen.send_signal(signal.SIGHUP)
        refused = 'podgpu_exporter_source_errors_total{source="counters",reason="malformed"}'
        wait_until(
            lambda: refused in exporter.client.ask("/metrics").text, "the collection would be empty"
        )
        assert exporter.series("DCGM_FI_DEV_POWER_USAGE")


def test_exporter_fields_and_binary_fields_without_dcgm(write: Write) -> None:
    """With 1 s, the counters of throttling are read less often, as a second group."""
    csv = write(
        "DCGM_EXP_P2P_STATUS,gauge,p\n"
        "DCGM_EXP_GPU_HEALTH_STATUS,gauge,h\n"
        "DCGM_FI_GPU_TOPOLOGY_PCI,gauge,x\n"
        "DCGM_FI_DEV_MIG_ATTRIBUTES,label,x\n",
        "c.csv",
    )
    simulated = ("exporter", "--once", "--telemetry", "simulated:2xH100,T4", "-c", "1000")
    ran = execute([*simulated, "-f", csv])
    assert families(ran) == {"DCGM_EXP_P2P_STATUS", "DCGM_EXP_GPU_HEALTH_STATUS"}
    assert "DCGM_FI_GPU_TOPOLOGY_PCI has no series: its values are binary data" in ran.err
    assert "DCGM_EXP" not in ran.err
    states = {}
    for family in parse_text(ran.out):
        if family.name == "DCGM_EXP_P2P_STATUS":
            for sample in family.samples:
                labels = sample.labels
                key = labels["gpu"], labels["peer_gpu"]
                states[key] = labels["link_status"], sample.value
    ok, no = ("OK", 0.0), ("NotSupported", 5.0)
    assert states == {
        ("0", "1"): ok,
        ("0", "2"): no,
        ("1", "0"): ok,
        ("1", "2"): no,
        ("2", "0"): no,
        ("2", "1"): no,
    }


def test_mig_instances_on_a_node_without_mig() -> None:
    ran = execute([*QUICK, "-d", "i"])
    assert ran.code == 1
    assert "-d i selects nothing: no GPU of this node has MIG instances" in ran.err
    assert "-d i selects none of this node's GPUs" in ran.err
    assert "this node has no GPU" not in ran.err
