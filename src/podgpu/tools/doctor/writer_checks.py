"""Checks what `--write` needs: an API server, permissions, and a directory to lock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator

from podgpu.decode import decode_json
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.kube.config import NoApi
from podgpu.kube.objects import KubeObject, read_map
from podgpu.node.holders.api import ApiAccess
from podgpu.tools.doctor.checks import Finding, note, ok, wrong
from podgpu.writers.node_lock import NodeLock
from podgpu.writers.write_option import NVSENTINEL, Permission, WriterOptions

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def check_writers(
    wanted: WriterOptions, api: ApiAccess, directory: str, sentinel_socket: str, deadline: float
) -> Iterator[Finding]:
    """`directory`: the one that the exporters of the node lock."""
    if not wanted.arguments:
        return

    yield _check_lock(directory)
    if NVSENTINEL in wanted.arguments:
        yield _check_socket(sentinel_socket)
    if wanted.needs_api:
        yield from _check_api(wanted, api, deadline)


def _check_api(wanted: WriterOptions, api: ApiAccess, deadline: float) -> Iterator[Finding]:
    try:
        api.check()
        missing = asyncio.run(_find_missing(wanted, api, deadline))
    except NoApi as error:
        yield wrong("write", f"--write: {error}")
        return
    except SourceError as error:
        yield wrong("write", f"--write: permissions cannot be checked: {error}")
        return

    for writer, lacking in missing.items():
        if lacking:
            text = f"--write {writer}: not allowed to {', '.join(map(_describe, lacking))}"
            advice = (
                f"bind the role of docs/kubernetes-writers.md, or set exporter.write=[{writer}]"
            )
            yield wrong("write", text, advice)
        else:
            yield ok("write", f"--write {writer}: all permissions are granted")


def _check_socket(path: str) -> Finding:
    if os.path.exists(path):
        return ok("write", f"--write nvsentinel: the socket {path} exists")
    advice = (
        "install NVSentinel's platform connector on this node, and mount the directory of its "
        "socket; podgpu reports the state when the socket appears"
    )
    return wrong("write", f"--write nvsentinel: the socket {path} does not exist", advice)


def _check_lock(directory: str) -> Finding:
    lock = NodeLock(directory)
    is_ours = lock.acquire()
    lock.release()
    if lock.problem:
        advice = "mount the kubelet's directory pod-resources, which may be read-only"
        return wrong("write", f"--write: {lock.problem}, so nothing would be written", advice)
    if is_ours:
        return ok("write", f"{directory} can be locked, so only one exporter of the node writes")

    return note("write", "another exporter of this node writes; a second one waits for its end")


async def _find_missing(
    wanted: WriterOptions, api: ApiAccess, deadline: float
) -> dict[str, list[Permission]]:
    missing = {}
    async with ApiClient(api.config, deadline) as client:
        for writer, permissions in wanted.permissions.items():
            # Not every writer uses the API server.
            if not permissions:
                continue
            missing[writer] = [each for each in permissions if not await _is_granted(client, each)]
    return missing


async def _is_granted(client: ApiClient, permission: Permission) -> bool:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": permission._asdict()},
    }
    answer = decode_json(await client.create(_REVIEWS, review), _REVIEWS, KubeObject)
    return bool(read_map(answer, "status").get("allowed"))


def _describe(permission: Permission) -> str:
    names: Iterable[str] = filter(None, (permission.resource, permission.subresource))
    return f"{permission.verb} {'/'.join(names)}"
