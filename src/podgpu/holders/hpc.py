"""Allocation source `hpc`: job files of an HPC scheduler's prolog, in dcgm-exporter's format.

A file is named `<gpu>` or `<gpu>.<gpu instance>`, with the driver's numbers, and contains one job per line.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from podgpu.errors import SourceError
from podgpu.files import ReadOnChange, explain
from podgpu.holders import AllocationSource
from podgpu.holders.device_ids import sort_allocation
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload

SOURCE = "hpc"
OPTION = "--hpc-job-mapping-dir"
MAX_BYTES = 256 * 1024
MAX_JOBS = 64
MAX_JOB_LENGTH = 256

_log = logging.getLogger(__name__)
_FILE_NAME = re.compile(r"\d+(\.\d+)?", re.ASCII)


class JobFile(NamedTuple):
    jobs: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()  # reasons why lines, or the whole file, were ignored


class HpcAllocation(AllocationSource):
    """Lists the directory each time and reads the files that changed."""

    name = SOURCE

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self._files: dict[str, ReadOnChange[JobFile]] = {}
        self._logged: dict[str, str] = {}  # file name -> reason that was logged

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        names = _list_job_files(self.directory)
        self._files = {name: self._files.get(name) or ReadOnChange(parse_jobs, MAX_BYTES) for name in names}
        return map_jobs({name: self._read(name) for name in names}, devices)

    def _read(self, name: str) -> JobFile:
        try:
            jobs = self._files[name].read(os.path.join(self.directory, name))
        except SourceError as error:
            if error.reason == "being_written":
                raise
            if error.reason == "file_missing":  # the job ended after the directory was listed
                return JobFile()
            if self._logged.get(name) != error.reason:
                self._logged[name] = error.reason
                _log.warning("%s", error)
            return JobFile(errors=(error.reason,))
        self._logged.pop(name, None)
        return jobs


def _list_job_files(directory: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if _FILE_NAME.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "not_a_directory" if isinstance(error, NotADirectoryError) else "file_missing"
        raise SourceError(
            reason,
            f"{directory} is not a directory with job files: create it in the scheduler's prolog, mount it, or set"
            f" {OPTION}",
        ) from error
    except (OSError, ValueError) as error:
        raise explain(error, directory) from error


def parse_jobs(content: bytes, path: str = "") -> JobFile:
    """Parses one job per line. Only a line feed ends a line, as in dcgm-exporter."""
    jobs: dict[str, None] = {}
    errors: set[str] = set()
    for line in content.split(b"\n"):
        try:
            job = line.decode().strip()
        except UnicodeDecodeError:
            errors.add("bad_job_id")
            continue
        if len(job) > MAX_JOB_LENGTH or not job.isprintable():
            errors.add("bad_job_id")
        elif job and job not in jobs and len(jobs) >= MAX_JOBS:
            errors.add("too_many_jobs")
        elif job:
            jobs[job] = None
    return JobFile(tuple(jobs), tuple(sorted(errors)))


def map_jobs(files: Mapping[str, JobFile], devices: Sequence[Device]) -> Allocation:
    """Maps job files to devices. Compares names as text, as dcgm-exporter does: `00` is not `0`."""
    by_name = {
        str(device.index) if device.gi_id is None else f"{device.index}.{device.gi_id}": device for device in devices
    }
    assignments: list[Assignment] = []
    unmapped: list[Unmapped] = []
    for name, file in files.items():
        device = by_name.get(name)
        holders = [Workload(job=job) for job in file.jobs]
        if device is None:
            unmapped += (Unmapped(SOURCE, "unknown_device", name, SOURCE, holder) for holder in holders)
        else:
            assignments += (Assignment(device.key, holder, SOURCE) for holder in holders)
        unmapped += (Unmapped(SOURCE, reason, name, SOURCE, Workload()) for reason in file.errors)
    return sort_allocation(assignments, unmapped)
