"""Adds the commit of a clone to the wheel, for `podgpu --version`.

Everything else is in pyproject.toml.

`make release` writes src/podgpu/commit.txt itself, because it builds from an archive without .git.
"""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode or not (ROOT / ".git").exists():
            return
        try:
            commit = subprocess.check_output(
                ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], cwd=ROOT
            )
        except (OSError, subprocess.CalledProcessError):
            return  # without git, or a clone of another user
        (Path(self.build_lib) / "podgpu" / "commit.txt").write_bytes(commit)


setup(cmdclass={"build_py": BuildWithCommit})
