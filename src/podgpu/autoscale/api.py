"""This module answers one request of the metrics APIs from a scene, as an object to be sent. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from podgpu.autoscale.api_json import Object, custom_values, external_value, pod_values
from podgpu.autoscale.api_paths import ANY, Asked, Described
from podgpu.autoscale.questions import Answer, Whom, figure_of, of_pods, of_scope, why_no_pods
from podgpu.autoscale.refusal import Refusal, no_data, not_found
from podgpu.autoscale.scene import Scene


def answer_custom(scene: Scene, version: str, asked: Asked) -> Object | bytes:
    """Of pods, of which there may be thousands, as the bytes to send. Raises Refusal."""
    if asked.resource == "pods":
        return _pods(scene, version, asked)
    if asked.resource == "nodes":
        found = _nodes(scene, asked)
    else:
        found = [(asked.described(), figure_of(scene, asked.pods(), asked.metric, asked.over))]
    return custom_values(version, asked, found)


def answer_external(scene: Scene, asked: Asked) -> Object:
    """Raises Refusal."""
    return external_value(asked, figure_of(scene, asked.pods(), asked.metric, asked.over))


def _pods(scene: Scene, version: str, asked: Asked) -> bytes:
    whom = asked.pods()
    pods = whom.pods(scene)
    if asked.name != ANY:
        pods = [pod for pod in pods if pod.name == asked.name]
        if not pods:
            raise not_found(f"no running pod {asked.namespace}/{asked.name}: check its name and whether it runs")
        whom = Whom(asked.namespace, owner=("pod", asked.name))
    found = of_pods(scene, pods, asked.metric, asked.over.window)
    if not found:
        raise why_no_pods(scene, whom, pods, asked.metric, asked.over.window)
    return pod_values(version, asked, found, scene.ends_at, scene.interval)


def _nodes(scene: Scene, asked: Asked) -> list[tuple[Described, Answer]]:
    if asked.name != ANY:
        answer = of_scope(scene, ("node", asked.name), asked.metric, asked.over.window)
        return [(asked.described(), answer)]
    found, last = [], None
    for name in _selected_nodes(scene, asked):
        try:
            found.append((asked.described(name), of_scope(scene, ("node", name), asked.metric, asked.over.window)))
        except Refusal as error:
            last = error
    if not found:
        raise last or not_found("no node with a GPU matches: check the label selector, and that exporters are read")
    return found


def _selected_nodes(scene: Scene, asked: Asked) -> Iterator[str]:
    labels = scene.node_labels
    if asked.selector.requirements and labels is None:
        raise no_data("the API server has not yet said which labels nodes have: may podgpu list and watch nodes?")
    for name in scene.nodes:
        if not asked.selector.requirements or (labels and asked.selector.matches(dict(labels.get(name, ())))):
            yield name
