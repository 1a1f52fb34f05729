"""This module puts into words what the health endpoints answer."""

from __future__ import annotations

from podgpu.agent.loop import Agent
from podgpu.agent.publish import Published

UNNAMED = "this node"


def node_of(agent: Agent) -> str:
    return agent.settings.policy.hostname or UNNAMED


def degraded(agent: Agent) -> list[str]:
    """One line for each source that does not work, and for what is wrong although all of them do."""
    snapshot = agent.published.snapshot
    lines = [f"{o.source}: {o.error}: {o.message}" for o in snapshot.outcomes if not o.ok]
    expected = snapshot.device_count.expected
    if snapshot.outcomes and not lines and not snapshot.device_count.visible and expected:
        lines.append(f"the PCI bus shows {expected} GPUs, the driver none: `podgpu doctor` says what to look at")
    return [*lines, *agent.notes_beside()]


def alerts(published: Published, node: str) -> list[str]:
    """What is serious of it, in the words of the page."""
    snapshot = published.snapshot
    is_well = all(o.ok for o in snapshot.outcomes) and not any(of.findings for of in snapshot.health)
    if is_well and not snapshot.device_count.lost:
        return []
    from podgpu.figures.from_snapshot import view_of_snapshot  # a node on which all is well does not load it

    return [alert.text for alert in view_of_snapshot(snapshot, node).alerts]


def live(agent: Agent) -> tuple[bool, str]:
    """A missing driver is no reason to restart us; a loop that stands still is."""
    if not agent.turns:
        return False, "podgpu does not read the GPUs any more (its loop is stuck)\n"
    lines = [*alerts(agent.published, node_of(agent)), *degraded(agent)]
    return True, "\n".join(["degraded", *lines, ""]) if lines else "OK\n"


def ready(agent: Agent) -> tuple[bool, str]:
    published = agent.published
    if not agent.is_fresh(published):
        return False, "the figures are too old to be shown\n"
    if not published.snapshot.readings:
        lines = [*alerts(published, node_of(agent)), *degraded(agent)]
        return False, "\n".join(["no GPU has been read", *lines, ""])
    return True, "OK\n"
