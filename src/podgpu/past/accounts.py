"""To which account the use of a holder is charged."""

from __future__ import annotations

import json
from collections.abc import Mapping

from podgpu.charge import UsageAccount
from podgpu.fleet.parts import HeldPart
from podgpu.model import WorkloadOwner

_NO_OWNER = WorkloadOwner("", "")


def account_of(
    part: HeldPart, pod_labels: Mapping[str, Mapping[str, str]] | None = None
) -> UsageAccount:
    """Returns the account of a holder. `pod_labels`: by `NAMESPACE/POD`."""
    holder = part.holder
    owner = part.owner or _NO_OWNER
    labels = None
    if pod_labels:
        labels = pod_labels.get(f"{holder.namespace}/{holder.pod}")

    # A pod's name is its account, also after a restart. Holders without a name have ids.
    return UsageAccount(
        namespace=holder.namespace,
        pod=holder.pod,
        job=holder.job_or_user,
        uid="" if holder.pod else holder.uid,
        container_id="" if holder.pod else holder.container_id,
        owner_kind=owner.kind,
        owner_name=owner.name,
        labels=json.dumps(labels, sort_keys=True) if labels else "",
        methods=part.device.known_usage.method,
        # A job or a container is an account of its own, also if its user is known.
        user="" if holder.job or holder.container_id else holder.user,
        model="" if part.engine is None else part.engine.model,
    )
