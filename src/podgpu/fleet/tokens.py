"""Divides the tokens of LLM engines among the GPUs of their containers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from msgspec.structs import replace

from podgpu.charge import Tokens
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import ContainerName, EngineState, HeldPart, container_name
from podgpu.model import PodName

Charged = Mapping[ContainerName, Tokens]
"""The tokens of each container that are charged already, since podgpu first read its engine."""


def charge_tokens(
    nodes: Sequence[NodeEntry], engines: Mapping[ContainerName, EngineState], before: Charged
) -> tuple[list[NodeEntry], Charged]:
    """Adds the tokens since the last charge to what the containers spent.

    If a container is not charged in this round, its tokens are charged in a later one.
    """
    if not engines:
        return list(nodes), before

    # Number of the container's GPUs whose time is charged in this round.
    charged_gpus: dict[ContainerName, int] = defaultdict(int)
    for node in nodes:
        for part in node.held:
            if part.spent is not None:
                charged_gpus[container_name(part.holder)] += 1

    # Other containers of the pod that hold GPUs belong to its cost per token, too.
    pods = _select_charged_pods(engines)
    charged: dict[ContainerName, Tokens] = {}
    shares: dict[ContainerName, list[Tokens]] = {}
    for name, engine in engines.items():
        last = before.get(name, Tokens())
        if engine.reason or not charged_gpus[name]:
            charged[name] = last
        else:
            charged[name] = engine.counted
            shares[name] = _divide(engine.counted, last, charged_gpus[name])

    complete = []
    for node in nodes:
        held = tuple(_add_engine(part, engines, shares, pods) for part in node.held)
        complete.append(replace(node, held=held))

    return complete, charged


def _select_charged_pods(engines: Mapping[ContainerName, EngineState]) -> set[PodName]:
    """Returns the pods whose engines were all read."""
    read: set[PodName] = set()
    failed: set[PodName] = set()
    for name, engine in engines.items():
        # In other containers, no engine has answered yet.
        if engine.engine:
            pods = failed if engine.reason else read
            pods.add(_pod_of(name))
    return read - failed


def _pod_of(container: ContainerName) -> PodName:
    namespace, pod, _ = container
    return namespace, pod


def _divide(now: Tokens, last: Tokens, parts: int) -> list[Tokens]:
    """Divides the increase into whole tokens. The parts add up to it."""
    more_prompt = now.prompt - last.prompt
    more_generated = now.generated - last.generated
    prompt, prompt_rest = divmod(more_prompt, parts)
    generated, generated_rest = divmod(more_generated, parts)

    shares = [Tokens(prompt, generated)] * parts
    shares[-1] = Tokens(prompt + prompt_rest, generated + generated_rest)
    return shares


def _add_engine(
    part: HeldPart,
    engines: Mapping[ContainerName, EngineState],
    shares: Mapping[ContainerName, list[Tokens]],
    pods: Set[PodName],
) -> HeldPart:
    name = container_name(part.holder)
    part = replace(part, engine=engines.get(name))
    if part.spent is None:
        return part

    if shares.get(name):
        # Each GPU of the container takes one of its shares.
        tokens = shares[name].pop()
    elif _pod_of(name) in pods:
        tokens = Tokens()
    else:
        return part

    return replace(part, spent=part.spent._replace(tokens=tokens))
