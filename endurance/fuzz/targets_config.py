"""What people write: options, counter files, kubeconfigs, web configs, prices, selectors, URLs, snapshots."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from random import Random
from warnings import catch_warnings

import click

from endurance.fuzz.mutate import Case, Make, blobs, documents, either, texts
from endurance.fuzz.target import Target
from podgpu.cli.exporter import command, parse_address
from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import normalise
from podgpu.cluster.prom.promql import parse_matchers
from podgpu.cluster.scraping.discover import Selection, check_port
from podgpu.configuration.collections import collection_of_fields
from podgpu.configuration.config_file import parse_go_duration
from podgpu.configuration.config_yaml import parse_config_file
from podgpu.configuration.pod_labels import LabelFilter
from podgpu.configuration.price_file import parse_prices
from podgpu.device_selection import parse_selection
from podgpu.errors import SourceError, UsageError
from podgpu.kube.kubeconfig import parse_kubeconfig, parse_sections
from podgpu.metrics.counters import SHIPPED, parse_counters, shipped_counters
from podgpu.metrics.fields import fields, parse_recipe
from podgpu.metrics.named_counters import Naming
from podgpu.migrate.dashboard import migrate_dashboard
from podgpu.migrate.direction import Direction
from podgpu.migrate.rewrite import rewrite_expression
from podgpu.migrate.rules import migrate_rules
from podgpu.migrate.syntax import parse_promql
from podgpu.migrate.tokens import PromqlError
from podgpu.model import Outcome, Snapshot
from podgpu.simulate.spec import MAX_GPUS, parse_spec
from podgpu.snapshot_json import dump_snapshot, load_snapshot
from podgpu.strict_yaml import parse_strict
from podgpu.web.web_config import parse_web_config

USAGE = (UsageError,)


def counters(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_counters(case.encode("utf-8", "replace").decode(), "a.csv")
    ids = [counter.field.id for counter in found]
    assert len(set(ids)) == len(ids), "a field twice"
    assert all("\n" not in counter.name for counter in found)
    for names in ("4.9", "both"):
        named = [counter.name for counter in Naming(names).of_user(found)]  # type: ignore[arg-type]
        assert len(set(named)) == len(named), "a family twice"
    return found


def selection(case: Case) -> object:
    assert isinstance(case, str)
    chosen = parse_selection(case)
    assert parse_selection(str(chosen)) == chosen, "what it says of itself means something else"
    return chosen


def exporter_arguments(case: Case) -> object:
    """As a command line, split at tabs. What is taken has values of the right kind."""
    assert isinstance(case, str)
    words = normalise(case.split("\t"), EXPORTER_OPTIONS)
    with redirect_stdout(StringIO()):
        try:
            options = command.make_context("exporter", words).params
        except click.exceptions.Exit:  # --help
            return None
    assert 0.1 <= options["collect_interval"] <= 86_400
    assert isinstance(options["kubernetes"], bool)
    return options


def config_file(case: Case) -> object:
    found = parse_config_file(_bytes(case), "config.yaml")
    assert all(0.1 <= collection.every <= 86_400 for collection in found.collections)
    chosen = collection_of_fields(found.counters or shipped_counters("default") or (), found.collections, True)
    assert len(set(chosen.values())) <= len(found.collections)
    return found


def go_duration(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_go_duration(case)
    assert found is None or found >= 0
    return found


def promql(case: Case) -> object:
    """What is rewritten can be read, has nothing left to rewrite, and comes back meaning the same."""
    assert isinstance(case, str)
    there = rewrite_expression(case, Direction("4.9"))
    parse_promql(there.text)
    if not there.left:
        again = rewrite_expression(there.text, Direction("4.9"))
        assert again.text == there.text, "rewritten again it is another"
        rewrite_expression(there.text, Direction("4.8"))
    return there


def grafana_dashboard(case: Case) -> object:
    text = _bytes(case).decode("utf-8", "replace")
    there = migrate_dashboard(text, "d.json", Direction("4.9"))
    json.loads(there.text)
    return there


_MOST_YAML = 50_000
"""PyYAML takes a second for 150 kB, and some cases are of megabytes: longer ones would be a test of patience."""


def rules(case: Case) -> object:
    text = _bytes(case)[:_MOST_YAML].decode("utf-8", "replace")
    return migrate_rules(text, "rules.yaml", Direction("4.9"))


def matchers(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_matchers(case)
    assert parse_matchers(",".join(map(str, found))) == found, "written again it means something else"
    return found or None


def kubeconfig(case: Case) -> object:
    return parse_kubeconfig([parse_sections(_bytes(case), "config")])


def web_config(case: Case) -> object:
    return parse_web_config(_bytes(case), "web.yml")


def prices(case: Case) -> object:
    found = parse_prices(_bytes(case), "prices.yaml")
    assert found.currency.isprintable()
    return found


def strict_yaml(case: Case) -> object:
    whole = parse_strict(_bytes(case), "a.yaml")
    for name in whole.names():
        for read in (whole.text, whole.texts, whole.flag, whole.whole_number, whole.amount, whole.mapping):
            try:
                read(name)
            except UsageError:
                continue
    return whole.names() or None


def simulated(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_spec(case)
    assert 0 < len(found) <= MAX_GPUS
    return found


def address(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_address(case)
    assert 0 <= found.port <= 65535
    return found


def discovery(case: Case) -> object:
    assert isinstance(case, str)
    return Selection.parse(case) if "=" in case else check_port(case)


def label_filter(case: Case) -> object:
    """Whatever the pattern, a label of any tenant's is looked at in bounded time."""
    assert isinstance(case, str)
    with catch_warnings(action="ignore"):  # of what a later Python will read otherwise
        allowed = LabelFilter(case)
    return [key for key in ("app", "app.kubernetes.io/name", "a" * 60, "") if allowed.allows(key)] or None


def snapshot(case: Case) -> object:
    found = load_snapshot(_bytes(case).decode())
    again = load_snapshot(dump_snapshot(found))
    assert repr(asdict(again)) == repr(asdict(found)), "dumped again it is another"
    return found


def _bytes(case: Case) -> bytes:
    assert isinstance(case, bytes)
    return case


# What good input looks like

_SHIPPED = [
    "".join(
        f"{counter.field.name}, {counter.type}, {counter.help}\n"
        for counter in (shipped_counters(name) or ())[at : at + 3]
    )
    for name in SHIPPED
    for at in (0, 9, 30)
]
_COUNTERS = [*_SHIPPED, '# a\nDCGM_FI_DEV_GPU_UTIL , gauge, "x, ""y"""\r\n', "DCGM_FI_DEV_XID_ERRORS,histogram,h\n"]
_ARGUMENTS = ["-c=1000\t-k\t-f\tdcp", "--kubernetes=false\t-a\t:9400", "-collectors\tx\t-d\tg:0-3", "--help", "-c\t5s"]
_FLAGS = [f"\t--{option.flag}" for option in EXPORTER_OPTIONS] + ["\t", "=", "=true", "\t-c\t", "100ms", "24h"]
_KUBECONFIG = {
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "n"}}],
    "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": True}}],
    "users": [{"name": "u", "user": {"token": "t"}}, {"name": "v", "user": {"exec": {"command": "x", "args": ["a"]}}}],
}
_HASH = "$2y$10$" + "a" * 53
_WEB = {
    "tls_server_config": {
        "cert_file": "a.pem",
        "key_file": "b.pem",
        "client_auth_type": "RequireAndVerifyClientCert",
        "client_ca_file": "c.pem",
        "min_version": "TLS12",
        "cipher_suites": ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"],
        "curve_preferences": ["X25519"],
    },
    "http_server_config": {"http2": True, "headers": {"X-Frame-Options": "deny"}},
    "basic_auth_users": {"alice": _HASH},
    "rate_limit": {"interval": "1s", "burst": 20},
}
_PRICES = {"currency": "EUR", "models": {"NVIDIA H100": {"gpu_hour": 2.5, "kwh": 0.3}, "*": {"kwh": 1}}}
_YAML_WORDS = (b"&a ", b"*a", b"!!int ''", b"!!binary x", b"<<: *a\n", b"? ", b"- ", b"|\n", b">-\n", b"%YAML 9\n---\n")
_URLS = ["http://10.0.0.1:9400/metrics", "https://u:hunter2@host/x?y=1#z", "[::1]:9400", "u:hunter2@host:9400", "host"]
_SNAPSHOT = json.loads(dump_snapshot(Snapshot(1.5, outcomes=(Outcome("nvml", 0.1),))))


_NAMES = [name for field in fields().values() for name in field.names]


def _rows(rng: Random) -> Case:
    """Known fields in rows of any form: an unknown one takes a hundred times as long."""
    cells = ("gauge", "counter", "label", "histogram", " gauge ", '"gauge"', "", "x", '"a, ""b"""', '"', "#", "é")
    rows = (", ".join((rng.choice(_NAMES), *rng.choices(cells, k=rng.choice((0, 1, 2, 2, 2, 3))))) for _ in range(4))
    return rng.choice(("\n", "\r\n", "\n\n", "\n#")).join(rows)


def _yaml(*documents_: object) -> Make:
    """JSON is YAML; the same written as people do, and spoilt as text."""
    lines = [_block(document).encode() for document in documents_]
    structured = documents(documents_)
    plain = blobs(lines, _YAML_WORDS)
    return lambda rng: (structured if rng.random() < 0.4 else plain)(rng)


def _block(value: object, indent: str = "") -> str:
    if isinstance(value, dict):
        return "".join(f"\n{indent}{json.dumps(key)}: {_block(member, indent + '  ')}" for key, member in value.items())
    if isinstance(value, list):
        return "".join(f"\n{indent}- {_block(member, indent + '  ')}" for member in value)
    return json.dumps(value)


def _arguments(rng: Random) -> Case:
    return "\t".join(rng.choice(_FLAGS).strip("\t") for _ in range(rng.randrange(4)))


_PROMQL = [
    "DCGM_FI_DEV_GPU_UTIL > 90",
    'sum by (Hostname) (rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu=~"$gpu"}[5m] offset 1h)) / 1000',
    "max_over_time(DCGM_FI_DEV_FB_USED[1h:1m])",
    "DCGM_FI_DEV_SM_CLOCK * 1000000",
    'DCGM_FI_DEV_GPU_TEMP * on (Hostname) group_left (x) label_replace(a, "Hostname", "$1", "b", "(.*)")',
    "label_values(DCGM_FI_DEV_GPU_TEMP, Hostname)",
]
_DASHBOARD: dict[str, object] = {
    "panels": [{"targets": [{"expr": "DCGM_FI_DEV_GPU_UTIL", "legendFormat": "{{Hostname}}"}], "title": "Hostname"}],
    "templating": {"list": [{"query": "label_values(DCGM_FI_DEV_GPU_TEMP, gpu)", "regex": "Hostname=", "name": "a"}]},
}
_RULES: dict[str, object] = {
    "groups": [
        {
            "rules": [
                {"alert": "A", "expr": "DCGM_FI_DEV_GPU_UTIL > 90", "annotations": {"a": "{{ $labels.Hostname }}"}},
                {"record": "b", "expr": "sum by (Hostname) (DCGM_FI_DEV_FB_USED)"},
            ]
        }
    ]
}
_CONFIG_1: dict[str, object] = {
    "version": 1,
    "metrics": {"file": "/etc/counters.csv"},
    "collection": {
        "interval": "30s",
        "retention": {"maxAge": "10m", "maxSamples": 0},
        "watchGroups": [{"name": "quick", "interval": "2s", "fields": ["DCGM_FI_DEV_GPU_TEMP"]}],
    },
}
_CONFIG_2: dict[str, object] = {
    "version": 2,
    "metrics": {"fields": [{"name": "DCGM_FI_DEV_GPU_TEMP", "prometheusType": "gauge", "help": "t"}]},
    "sources": {"dcgm": {"watch": {"maxKeepAge": "10m"}, "detectBindUnbind": {"enabled": True, "pollInterval": "1s"}}},
    "collections": [
        {"name": "base", "every": "30s", "metrics": {"include": ["*"]}},
        {"name": "quick", "every": "2s", "metrics": {"include": ["DCGM_FI_DEV_GPU_[A-T]*", "DCGM_?"]}},
    ],
    "server": {"maxConcurrentScrapes": 8},
}

CONFIG_TARGETS = (
    Target("counters", either(texts(_COUNTERS, (",gauge,", '""')), _rows, _rows, _rows), counters, USAGE),
    Target("device-selection", texts(["g:0,2-4", "i", "f", "g:99999-1", "i:0-9,3"]), selection, USAGE),
    Target(
        "exporter-arguments",
        either(texts(_ARGUMENTS, _FLAGS), _arguments),
        exporter_arguments,
        (UsageError, click.UsageError),
    ),
    Target("promql-matchers", texts(['cluster="a",team=~"x|y"', 'a!="b" , c!~"\\"d"', ""]), matchers, USAGE),
    Target("kubeconfig", _yaml(_KUBECONFIG), kubeconfig, (SourceError,)),
    Target("web-config", _yaml(_WEB, {"basic_auth_users": {"a": _HASH}}), web_config, USAGE),
    Target("prices", _yaml(_PRICES), prices, USAGE),
    Target("config-file", _yaml(_CONFIG_2, _CONFIG_1, {"version": 2}), config_file, USAGE),
    Target(
        "promql",
        texts(_PROMQL, ("DCGM_FI_DEV_GPU_UTIL", "rate(", "[5m]", " * 100)", "by (Hostname)", "$x", "[[", ")", "(")),
        promql,
        (PromqlError,),
    ),
    Target("grafana-dashboard", documents([_DASHBOARD]), grafana_dashboard, USAGE),
    Target("prometheus-rules", _yaml(_RULES), rules, USAGE),
    Target("go-durations", texts(["1h30m", "1.5s", "500ms", "0", ".5us", "-1s"]), go_duration),
    Target("strict-yaml", _yaml(_WEB, _PRICES, {"a": [1, True, None, "x"]}), strict_yaml, USAGE),
    Target(
        "simulated-gpus",
        texts(["8xH100", "1xH100/7x1g.10gb", "2xA100,L4", "1xA100/2x1g.5gb+1x3g.20gb"]),
        simulated,
        USAGE,
    ),
    Target("listen-address", texts([":9400", "127.0.0.1:9400", "[::1]:9400", "name:0"]), address, USAGE),
    Target("discovery", texts(["app=podgpu", "ns/app=podgpu", "/a.b/c=d", "metrics", "9400", "any"]), discovery, USAGE),
    Target("label-allowlist", texts(["^app$", "app,name", "[ab]+$", ""]), label_filter, USAGE),
    Target(
        "recipes",
        texts(["nvmlX(a,1).b", "field 1+2@all", "gpm 3", "event x"]),
        lambda c: parse_recipe(str(c)),
        (ValueError,),
    ),
    Target("snapshot", documents([_SNAPSHOT]), snapshot, (ValueError, KeyError, TypeError)),
)
