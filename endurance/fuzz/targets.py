"""All targets by name, and the rule that there is one for every parser: `tests/endurance/test_fuzz.py` looks."""

from __future__ import annotations

from endurance.fuzz.target import Target
from endurance.fuzz.targets_api import API_TARGETS
from endurance.fuzz.targets_autoscale import AUTOSCALE_TARGETS
from endurance.fuzz.targets_config import CONFIG_TARGETS
from endurance.fuzz.targets_driver import DRIVER_TARGETS
from endurance.fuzz.targets_expositions import EXPOSITION_TARGETS
from endurance.fuzz.targets_history import HISTORY_TARGETS
from endurance.fuzz.targets_holders import HOLDER_TARGETS
from endurance.fuzz.targets_host import HOST_TARGETS

_ALL = (
    *EXPOSITION_TARGETS,
    *HOLDER_TARGETS,
    *API_TARGETS,
    *CONFIG_TARGETS,
    *HOST_TARGETS,
    *DRIVER_TARGETS,
    *HISTORY_TARGETS,
    *AUTOSCALE_TARGETS,
)
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
