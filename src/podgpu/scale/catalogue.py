"""The metrics for scaling workloads (docs/autoscaling.md).

A pod's value is computed over the devices it holds. Utilisation and activity are means, memory is
the used fraction of the total, power is the sum. If one device does not report a value, the pod has
no value.
"""

from __future__ import annotations

from typing import NamedTuple


class ScalingMetric(NamedTuple):
    name: str
    column: int  # index in a row of samples
    needs: str  # what the metric requires, for error messages
    field: str = ""  # DCGM field of the metric


_USAGE = "the exporter must see processes (docs/usage.md), or the pod must have its GPUs to itself"


def _profiling_metric(name: str, column: int, field: str) -> ScalingMetric:
    advice = (
        f"the exporter's counters must include {field}, and the pod must have its GPUs or MIG "
        "instances to itself"
    )
    return ScalingMetric(name, column, advice, field)


UTILIZATION = ScalingMetric("gpu_utilization", 0, _USAGE)
MEMORY = ScalingMetric("gpu_memory_utilization", 1, _USAGE)
BUSY = ScalingMetric(
    "gpu_busy",
    2,
    "the exporter must count busy seconds (docs/usage.md), and a rate needs two readings",
)
POWER = ScalingMetric("gpu_power", 3, "the exporter must provide power or energy (docs/usage.md)")
SM = _profiling_metric("gpu_sm_activity", 4, "DCGM_FI_PROF_SM_ACTIVE")
TENSOR = _profiling_metric("gpu_tensor_activity", 5, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")
DRAM = _profiling_metric("gpu_dram_activity", 6, "DCGM_FI_PROF_DRAM_ACTIVE")
USED = ScalingMetric(
    "avg_GPU_utilization",
    7,
    "the exporter must export --used-field, which GPUs in MIG mode may not have",
)
# column with the number of devices in use; `USED.column` has the sum of their values
USED_COUNT = 8
IDLE = 9  # column with the seconds for which the pod has been idle; NaN if busy or unknown
WAIT = ScalingMetric(
    "gpu_wait",
    10,
    "the exporter must read context switches (--usage-from switches or exact), and a rate needs "
    "two readings",
)
COLUMNS = 11
METRICS = (UTILIZATION, MEMORY, BUSY, WAIT, POWER, SM, TENSOR, DRAM, USED)
PROFILING_METRICS = (SM, TENSOR, DRAM)
