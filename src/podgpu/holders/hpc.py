"""Allocation source `hpc`: job files of an HPC scheduler's prolog, in dcgm-exporter's format.

A file is named `<gpu>` or `<gpu>.<gpu instance>`, with the driver's numbers, and contains one job per line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from podgpu.errors import SourceError
from podgpu.files import explain_read_error, read_bounded
from podgpu.holders import AllocationSource
from podgpu.holders.device_ids import sort_allocation
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload

SOURCE = "hpc"
OPTION = "--hpc-job-mapping-dir"
MAX_BYTES = 256 * 1024

_FILE_NAME = re.compile(r"\d+(\.\d+)?", re.ASCII)


class HpcAllocation(AllocationSource):
    """Reads all job files each time."""

    name = SOURCE

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        # Names are compared as text, as dcgm-exporter does: `00` is not `0`.
        by_name = {
            str(device.index) if device.gi_id is None else f"{device.index}.{device.gi_id}": device
            for device in devices
        }
        assignments: list[Assignment] = []
        unmapped: list[Unmapped] = []
        for name in self._list_files():
            try:
                jobs = parse_jobs(read_bounded(os.path.join(self.directory, name), MAX_BYTES))
            except SourceError as error:
                if (
                    error.reason != "file_missing"
                ):  # a missing file means that the job ended after the directory was listed
                    unmapped.append(Unmapped(SOURCE, error.reason, name, SOURCE, Workload()))
                continue
            holders = [Workload(job=job) for job in jobs]
            if name in by_name:
                assignments += (Assignment(by_name[name].key, holder, SOURCE) for holder in holders)
            else:
                unmapped += (Unmapped(SOURCE, "unknown_device", name, SOURCE, holder) for holder in holders)
        return sort_allocation(assignments, unmapped)

    def _list_files(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.directory) if _FILE_NAME.fullmatch(name)]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SourceError(
                "file_missing",
                f"{self.directory} is not a directory with job files: create it in the scheduler's prolog, mount it,"
                f" or set {OPTION}",
            ) from error
        except (OSError, ValueError) as error:
            raise explain_read_error(error, self.directory) from error


def parse_jobs(content: bytes) -> list[str]:
    """Parses one job per line. Only a line feed ends a line, as in dcgm-exporter."""
    lines = (line.strip() for line in content.decode(errors="replace").split("\n"))
    return list(dict.fromkeys(line for line in lines if line))
