"""Copies constants of podgpu into the chart and other files: `python -m deploy.tables`.

The constants are the version, the project's URL, the image, the names of the allocation sources,
the XIDs that mean a broken GPU, the definition of idle, and the counters of LLM engines. Sources
are used in the schema of the values and in an alert. Also writes the chart's README.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

from deploy.render import CHART, ROOT
from podgpu import PROJECT_URL, REGISTRY, __version__
from podgpu.cli.sources import SOURCES, SOURCES_WITH_ARGUMENT
from podgpu.metrics.conditions import xid_specs
from podgpu.metrics.engines import RANK_LABELS, Engine, EngineFamily, engines
from podgpu.metrics.promql import idle_rule

SCHEMA = CHART / "values.schema.json"
ALERTS = CHART / "files" / "rules" / "podgpu-alerts.yaml"
TOKENS = CHART / "files" / "rules" / "podgpu-tokens.yaml"
_ALLOCATION = re.compile(r'(?<="allocation": \{\n {14}"type": "string",\n {14}"pattern": ")[^"]+')
_SOURCES = re.compile(r'(?<=podgpu_exporter_source_up\{source=~")[^"]+(?=\|api-server"\})')
_IDLE_RULE = re.compile(r"(?<=- record: podgpu:idle:ratio10m\n {8}expr: \|\n)(?: {10}.*\n)+")
_TOKEN_RULES = re.compile(
    r"(?<=and counted them\.\n)(?: +- record: podgpu:pod_llm_tokens:rate5m\n(?: {8}.*\n)+)+"
)
_XIDS = re.compile(r'(?<=podgpu_xid_last_seen_timestamp_seconds\{xid=~")[\d|]+(?="\})')
_PROJECT_URL = re.compile(r"https://[\w.-]+/[\w.-]+/podgpu(?![\w.-])")
_CHART_VERSION = re.compile(r"(?<=^version: )\S+|(?<=^appVersion: )\S+", re.MULTILINE)
_CHART_IMAGE = re.compile(r"(?<=^  repository: )\S+", re.MULTILINE)
_VERSION = re.compile(r'(podgpu:|podgpu-image-|image\.tag=|"version":"|the tag `)\d+\.\d+\.\d+')
_IMAGE = re.compile(r"[\w.]+\.\w+/[\w-]+/podgpu(?=:\d)")
NAMED_FILES = [
    CHART / "Chart.yaml",
    CHART / "values.yaml",
    ROOT / "deploy" / "demo" / "compose.yaml",
    ROOT / "README.md",
    ROOT / "pyproject.toml",
]
NAMED_FILES += sorted((ROOT / "docs").glob("*.md"))
NAMED_FILES += sorted((ROOT / "deploy" / "systemd").glob("podgpu.*"))
NAMED_FILES += sorted((ROOT / "tests" / "deploy" / "rules").glob("*.yaml"))
README = """\
<!-- Generated from values.yaml by `make manifests`. -->
# podgpu

podgpu shows which pod uses which GPU, how much of it, and what that costs. It replaces dcgm-exporter, or runs beside
it, and does not need DCGM. Documentation: <{project}>.

No image and no chart are published yet. Build both in the repository (needs Python 3.11 or later, but no Docker), and
push the image to a registry from which your nodes can pull:

```console
$ make release
$ skopeo copy --all oci-archive:dist/podgpu-image-{version}.tar docker://registry.example.com/podgpu:{version}
$ helm upgrade --install podgpu deploy/helm/podgpu --namespace monitoring --create-namespace \\
    --set image.repository=registry.example.com/podgpu,cluster.profile=full
```

The packed chart, `dist/podgpu-{version}.tgz`, can replace `deploy/helm/podgpu`. With a registry of your own, also from there:

```console
$ helm push dist/podgpu-{version}.tgz oci://registry.example.com/charts
$ helm upgrade --install podgpu oci://registry.example.com/charts/podgpu --version {version} --namespace monitoring \\
    --create-namespace --set image.repository=registry.example.com/podgpu,cluster.profile=full
```

`autoscale` and `demo` need the image with the tag `{version}-autoscale`. On a cluster without GPUs (kind, minikube), run the demo with
simulated GPUs:

```console
$ skopeo copy --all oci-archive:dist/podgpu-image-{version}-autoscale.tar docker://registry.example.com/podgpu:{version}-autoscale
$ helm upgrade --install podgpu deploy/helm/podgpu --namespace monitoring --create-namespace \\
    --set image.repository=registry.example.com/podgpu,demo.enabled=true
$ kubectl -n monitoring port-forward service/podgpu-demo 9401
```

## Values

| Value | Default | Meaning |
|---|---|---|
{rows}"""


def pattern() -> str:
    """Returns a regular expression for the values of `--allocation`. The chart replaces an empty
    value.
    """
    patterns = []
    for name in SOURCES:
        argument = "(:[^,]+)?" if name in SOURCES_WITH_ARGUMENT else ""
        patterns.append(name + argument)
    any_of = "|".join(patterns)
    return f"^(auto|({any_of})(,({any_of}))*)?$"


def fresh() -> Iterator[tuple[Path, str]]:
    """Yields each generated file with the content that it should have."""
    for path in NAMED_FILES:
        yield path, _write_names(path)
    yield CHART / "README.md", render_readme()
    xids = "|".join(str(xid) for xid, spec in xid_specs().items() if spec.needs_action)
    yield SCHEMA, _replace(SCHEMA.read_text(encoding="utf-8"), _ALLOCATION, pattern(), 1)
    alerts = _replace(_write_names(ALERTS), _SOURCES, "|".join(SOURCES), 1)
    alerts = _replace(alerts, _IDLE_RULE, indent(idle_rule(), " " * 10), 1)
    yield ALERTS, _replace(alerts, _XIDS, xids, 2)
    token_rules = "".join(_make_token_rules())
    yield TOKENS, _replace(_write_names(TOKENS), _TOKEN_RULES, token_rules, 1)


TOKEN_RULE = """\
- record: podgpu:pod_llm_tokens:rate5m
  labels: {{engine: {engine}, kind: {kind}}}
  expr: |
    {sum}
    and on (cluster, namespace, pod) podgpu_allocation_info
"""
TOKEN_SUM = """\
sum by (cluster, namespace, pod, model) (
  label_replace(
    {rates},
    "model", "$1", "model_name", "(.+)"
  )
)"""
TOKEN_RATE = """\
max by (
  cluster, namespace, pod, instance, model, model_name, engine,
  {others}
) (rate({series}[5m]))"""


def _make_token_rules() -> Iterator[str]:
    for engine in engines():
        for kind in ("prompt", "generation"):
            total = _sum_tokens(engine, kind)
            rule = TOKEN_RULE.format(engine=engine.name, kind=kind, sum=_indent_rest(total, 4))
            yield indent(rule, " " * 6)


def _sum_tokens(engine: Engine, kind: str) -> str:
    """Returns the tokens per second of each pod and model."""
    counter = engine.prompt if kind == "prompt" else engine.generated
    rates = _write_rate(counter)
    if kind == "prompt" and engine.transferred is not None:
        rates += f"\nor\n-{_write_rate(engine.transferred)}"

    total = TOKEN_SUM.format(rates=_indent_rest(rates, 4))
    if kind == "prompt" and engine.transferred is not None:
        # The two counters are not read at the same moment.
        return f"clamp_min({total}, 0)"
    return total


def _write_rate(family: EngineFamily) -> str:
    matchers = 'pod!=""'
    labels = [label for label in RANK_LABELS if label != "engine"]
    if family.label:
        matchers += f',{family.label}="{family.value}"'
        labels.append(family.label)
    series = f"{family.name}{{{matchers}}}"
    return TOKEN_RATE.format(others=", ".join(labels), series=series)


def _indent_rest(text: str, width: int) -> str:
    """Indents all lines except the first one."""
    return text.replace("\n", "\n" + " " * width)


def _write_names(path: Path) -> str:
    text = _PROJECT_URL.sub(PROJECT_URL, path.read_text(encoding="utf-8"))
    image = f"{REGISTRY}/podgpu"
    if path.parent == CHART:
        text = _CHART_VERSION.sub(__version__, text)
        text = _CHART_IMAGE.sub(image, text, count=1)
    text = _IMAGE.sub(image, text)
    return _VERSION.sub(rf"\g<1>{__version__}", text)


def render_readme() -> str:
    """Returns the chart's README: installation, and a table of the values and comments in
    values.yaml.
    """
    rows = "".join(f"| `{key}` | {default} | {about} |\n" for key, default, about in read_values())
    return README.format(project=PROJECT_URL, version=__version__, rows=rows)


def read_values() -> Iterator[tuple[str, str, str]]:
    """Yields key, default and comment of every value. A comment is above its key or after its
    default.
    """
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            above.append(text.removeprefix("#").strip())
            continue
        entry = re.match(r"( *)([\w.-]+):(?: +|$)(.*)", line)
        if entry is None:
            above = []
            continue
        indent = len(entry[1])
        key = entry[2]
        parents = [parent for parent in parents if parent[0] < indent]
        separator = "  # " if "  # " in entry[3] else "# "
        default, _, behind = entry[3].partition(separator)
        path = ".".join([name for _, name in parents] + [key])
        about = " ".join([*above, behind.strip()]).strip().replace("|", "\\|")
        default = default.strip()
        if default:
            yield path, f"`{default}`".replace("|", "\\|"), about
        elif about:
            yield path, "", about
        parents.append((indent, key))
        above = []


def _replace(text: str, place: re.Pattern[str], new: str, times: int) -> str:
    replaced, found = place.subn(lambda _: new, text)
    assert found == times, f"{place.pattern} was found {found} times instead of {times}"
    return replaced


def main() -> None:
    for path, text in fresh():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: rewritten")


if __name__ == "__main__":
    main()
