"""Finds the version of an API group that podgpu and the server support."""

from __future__ import annotations

from collections.abc import Sequence

from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.kube.objects import read_list

DRA_GROUP = "resource.k8s.io"


async def find_version(client: ApiClient, group: str, versions: Sequence[str], advice: str) -> str:
    """Returns the first of `versions` that the server has. They are sorted by preference.

    Raises SourceError if there is none.
    """
    path = f"/apis/{group}"
    offered = set()
    try:
        body = await client.get(path)
        offered = {version["version"] for version in read_list(body, "versions")}
    except SourceError as error:
        # Objects may be readable even if discovery is not.
        if error.reason == "forbidden":
            return versions[0]
        if error.reason != "not_found":
            raise

    for version in versions:
        if version in offered:
            return version

    text = f"the API server has no supported version of {path}: {advice}; podgpu retries"
    raise SourceError("not_found", text)
