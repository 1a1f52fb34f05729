"""What becomes of a panel's query so that it serves exporters with either names; test_dashboards.py has it answered."""

from __future__ import annotations

import pytest

from deploy.dashboards.either import choice_query, either


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("sum(podgpu_allocation_share_ratio)", "sum(podgpu_allocation_share_ratio)"),
        ("rate(podgpu_namespace_gpu_busy_seconds_total[5m])", "rate(podgpu_namespace_gpu_busy_seconds_total[5m])"),
        ("DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_TX_BYTES"),
        ("max(DCGM_FI_DEV_GPU_TEMP)", "max((DCGM_FI_DEV_GPU_TEMP or DCGM_FI_DEV_GPU_TEMP_CELSIUS))"),
        ('DCGM_FI_DEV_GPU_UTIL{a="b"}', '(DCGM_FI_DEV_GPU_UTIL{a="b"} or DCGM_FI_DEV_GPU_UTIL_RATIO{a="b"} * 100)'),
        ("DCGM_FI_DEV_FB_USED", "(DCGM_FI_DEV_FB_USED or DCGM_FI_DEV_FB_USED_BYTES / 1048576)"),
        (
            "increase(DCGM_FI_DEV_PCIE_REPLAY_COUNTER[5m])",
            "(increase(DCGM_FI_DEV_PCIE_REPLAY_COUNTER[5m]) or increase(DCGM_FI_DEV_PCIE_REPLAY_TOTAL[5m]))",
        ),
        (
            'max(podgpu_device_count{Hostname=~"$node"})',
            'max((podgpu_device_count{Hostname=~"$node",hostname=""} or label_replace('
            'podgpu_device_count{hostname=~"$node",hostname!=""}, "Hostname", "$1", "hostname", "(.+)")))',
        ),
        (
            "sum by (Hostname) (rate(podgpu_device_busy_seconds_total[5m]))",
            'sum by (Hostname) ((rate(podgpu_device_busy_seconds_total{hostname=""}[5m]) or label_replace('
            'rate(podgpu_device_busy_seconds_total{hostname!=""}[5m]), "Hostname", "$1", "hostname", "(.+)")))',
        ),
        ("count by (Hostname) (podgpu_allocation_info)", "count by (Hostname) (podgpu_allocation_info)"),
    ],
)
def test_a_query_asks_for_either(query: str, asked: str) -> None:
    assert either(query) == asked


def test_a_variable_stays_plain_where_there_is_one_name() -> None:
    assert choice_query("podgpu_allocation_info", "namespace") == (
        "label_values(podgpu_allocation_info, namespace)",
        "",
    )


def test_a_variable_with_two_names_is_a_query() -> None:
    query, pattern = choice_query("DCGM_FI_DEV_GPU_TEMP", "modelName")
    assert query == "query_result(count by (modelName) ((DCGM_FI_DEV_GPU_TEMP or DCGM_FI_DEV_GPU_TEMP_CELSIUS)))"
    assert pattern == '/modelName="([^"]+)"/'
