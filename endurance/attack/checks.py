"""What must be in every text in spite of everything: the well GPUs of the exporter, the honest node of the cluster."""

from __future__ import annotations

from endurance.attack.exporter_process import NO_ENERGY, WELL, driver
from endurance.attack.scraper import lines_of
from endurance.attack.victims import NODE

_UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
_ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"


class ExporterCheck:
    """Keeps the energy counters between expositions. `well`: all of them answer with numbers."""

    def __init__(self, well: bool = False) -> None:
        self._well = well
        self._uuids = {gpu.number: gpu.uuid for gpu in driver().machine.gpus}
        self._energy: dict[str, float] = {}

    def __call__(self, exposition: str) -> list[str]:
        found = {labels["UUID"]: (labels, value) for labels, value in lines_of(exposition, _UTILISATION)}
        wrong = []
        for number, percent in WELL.items():
            labels, value = found.get(self._uuids[number], ({}, -1.0))
            if not labels:
                wrong.append("a well GPU is not in the metrics")
            elif value != percent:
                wrong.append("a well GPU's figure is not right")
            elif labels.get("pod") != f"on-{number}":
                wrong.append("a well GPU's pod is not in the metrics")
        return wrong + self._judge_energy(exposition)

    def _judge_energy(self, exposition: str) -> list[str]:
        wrong = []
        for labels, value in lines_of(exposition, _ENERGY):
            uuid = labels["UUID"]
            if value < self._energy.get(uuid, 0.0):
                wrong.append("a counter falls")
            if uuid == self._uuids[NO_ENERGY] and not self._well:
                wrong.append("what is no number is in the metrics")
            self._energy[uuid] = value
        return wrong


class ClusterCheck:
    def __call__(self, exposition: str) -> list[str]:
        of_node = [
            (labels["model"], n) for labels, n in lines_of(exposition, "podgpu_node_gpus") if labels["node"] == NODE
        ]
        up = {labels["node"]: value for labels, value in lines_of(exposition, "podgpu_cluster_node_up")}
        wrong = []
        if not of_node:
            wrong.append("the honest node is not in the metrics")
        elif len(of_node) != 1 or "H100" not in of_node[0][0] or not len(WELL) <= of_node[0][1] <= len(WELL) + 2:
            wrong.append("the honest node is not shown as it is")
        elif up.get(NODE) != 1:
            wrong.append("the honest node is said to be down")
        return wrong


def check_nothing(_exposition: str) -> list[str]:
    return []
