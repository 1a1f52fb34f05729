"""`python -m deploy.dashboards`: writes the JSON into the chart. `--check` only reports outdated
files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploy.dashboards.cluster import cluster
from deploy.dashboards.node import node
from deploy.dashboards.pod import pod
from deploy.dashboards.waste import waste

FOLDER = Path(__file__).parents[1] / "helm" / "podgpu" / "files" / "dashboards"


def rendered() -> dict[Path, str]:
    return {
        FOLDER / f"{made['uid']}.json": json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        for made in (node(), pod(), cluster(), waste())
    }


def main(arguments: list[str]) -> int:
    stale = [
        p
        for p, text in rendered().items()
        if not p.exists() or p.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.name} is outdated: run python -m deploy.dashboards")
        return 1 if stale else 0
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
