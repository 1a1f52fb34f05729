"""Shows what the package on the path makes of nodes, as JSON: `python -m tests.compose.new_source.show NODES FOLDER`.

`NODES` has a folder for each, as tests/nodes has; `FOLDER` is for their sockets and files. It is a process of its own:
the package is an edited copy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import podgpu
from deploy.sources import pattern
from podgpu.compose.allocations import spellings
from podgpu.errors import UsageError
from tests import test_architecture
from tests.nodes.test_nodes import exposition_of


def shown(node: Path, folder: Path) -> str:
    """The exposition, or why there is none."""
    folder.mkdir()
    try:
        return exposition_of(node, folder)
    except UsageError as error:
        return str(error)


def main(nodes: Path, folder: Path) -> None:
    test_architecture.test_a_small_file_owns_something()
    for room in ("allocation", "compose"):
        test_architecture.test_imports_point_downwards(room)
    told = {node.name: shown(node, folder / node.name) for node in nodes.iterdir()}
    print(json.dumps({**told, "package": podgpu.__file__, "help": spellings(), "chart": pattern()}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
