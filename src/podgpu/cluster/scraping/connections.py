"""How many connections may stay open: as many as the system lets a process have files."""

from __future__ import annotations

import resource

_OTHER_FILES = 256
"""What else is open: whoever asks us, the API server, files."""


def allow_connections(count: int) -> str:
    """Raises the process's own limit as far as it may. Empty when there is room; else a note that says what to do."""
    wanted = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most >= wanted:
        return ""
    return (
        f"{count} exporters and only {hard} files may be open (ulimit -n): connections are not kept open between"
        f" rounds; allow {wanted}"
    )
