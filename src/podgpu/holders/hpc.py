"""This module says which jobs of an HPC scheduler run on which GPU, from a directory its prolog writes. Reads; never
writes.

dcgm-exporter's convention: a file named `<gpu>` or `<gpu>.<gpu instance>`, by the driver's numbers, has one job per
line. No file, or an empty one, is nobody. Files of other names are none of our business.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podgpu.errors import SourceError
from podgpu.files import ReadOnChange, explain
from podgpu.holders.holdings import in_order
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload

SOURCE = "hpc"
OPTION = "--hpc-job-mapping-dir"
MOST_BYTES = 256 * 1024
MOST_JOBS = 64
LONGEST_JOB = 256

_log = logging.getLogger(__name__)
_FILE_NAME = re.compile(r"\d+(\.\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class JobFile:
    """The jobs in one file, and reason words for what was left out."""

    jobs: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class HpcAllocation:
    """Lists the directory at each reading, and reads again the files that changed."""

    name = SOURCE

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self._files: dict[str, ReadOnChange[JobFile]] = {}
        self._told: dict[str, str] = {}
        """File name -> why it cannot be read, as said in the log."""

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """The directory as it is now, mapped onto the devices given."""
        names = list_job_files(self.directory)
        self._files = {name: self._files.get(name) or ReadOnChange(parse_jobs, MOST_BYTES) for name in names}
        return map_jobs({name: self._read(name) for name in names}, devices)

    def close(self) -> None:
        """Nothing stays open between readings."""

    def _read(self, name: str) -> JobFile:
        """One file that cannot be read takes nothing from the others."""
        try:
            jobs = self._files[name].read(os.path.join(self.directory, name))
        except SourceError as error:
            if error.reason == "being_written":
                raise
            if error.reason == "file_missing":  # removed since the directory was listed: the job has ended
                return JobFile()
            if self._told.get(name) != error.reason:
                self._told[name] = error.reason
                _log.warning("%s", error)
            return JobFile(left_out=(error.reason,))
        self._told.pop(name, None)
        return jobs


def list_job_files(directory: str) -> list[str]:
    """Names of the job files there."""
    try:
        return sorted(name for name in os.listdir(directory) if _FILE_NAME.fullmatch(name))
    except FileNotFoundError as error:
        raise SourceError(
            "file_missing",
            f"the job directory {directory} is not there: have the scheduler's prolog make it, mount it,"
            f" or name another with {OPTION}",
        ) from error
    except NotADirectoryError as error:
        raise SourceError(
            "not_a_directory", f"{directory} is not a directory: name the one that holds the job files with {OPTION}"
        ) from error
    except (OSError, ValueError) as error:
        raise explain(error, directory) from error


def parse_jobs(content: bytes, path: str = "") -> JobFile:
    """One job per line, each once; lines end as Go's scanner has it, with a line feed and nothing else."""
    jobs: dict[str, None] = {}
    left_out: set[str] = set()
    for line in content.split(b"\n"):
        job = _parse_job(line)
        if job is None:
            left_out.add("bad_job_id")
        elif job and len(jobs) >= MOST_JOBS and job not in jobs:
            left_out.add("too_many_jobs")
        elif job:
            jobs[job] = None
    return JobFile(tuple(jobs), tuple(sorted(left_out)))


def _parse_job(line: bytes) -> str | None:
    """Empty for a blank line; None for what should not stand in a label or a log."""
    try:
        job = line.decode().strip()
    except UnicodeDecodeError:
        return None
    return job if len(job) <= LONGEST_JOB and job.isprintable() else None


def map_jobs(files: Mapping[str, JobFile], devices: Sequence[Device]) -> Allocation:
    """Which jobs hold which of the devices. Names are compared as dcgm-exporter does: `00` is not `0`."""
    by_name = {_file_name(device): device for device in devices}
    assignments: list[Assignment] = []
    unmapped: list[Unmapped] = []
    for name, file in files.items():
        device = by_name.get(name)
        holders = [Workload(job=job) for job in file.jobs]
        if device is None:
            unmapped += (Unmapped(SOURCE, "unknown_device", name, SOURCE, holder) for holder in holders)
        else:
            assignments += (Assignment(device.key, holder, SOURCE) for holder in holders)
        unmapped += (Unmapped(SOURCE, reason, name, SOURCE, Workload()) for reason in file.left_out)
    return in_order(assignments, unmapped)


def _file_name(device: Device) -> str:
    return str(device.index) if device.gi_id is None else f"{device.index}.{device.gi_id}"
