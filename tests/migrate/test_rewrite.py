"""Tests the conversion of PromQL from the names, labels and units of dcgm-exporter 4.8 to those of
4.9.
"""

from __future__ import annotations

import pytest

from podgpu.tools.migrate.query_rewriter import (
    Edit,
    PromqlError,
    apply_edits,
    find_old_names,
    rewrite_query,
)

UTIL, UTIL_RATIO = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO"
USED, USED_BYTES = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_USED_BYTES"
ENERGY, JOULES = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL"
TEMP, CELSIUS = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"

REWRITTEN = [
    # names only
    (TEMP, CELSIUS),
    (f'{TEMP}{{gpu="0"}} offset 5m', f'{CELSIUS}{{gpu="0"}} offset 5m'),
    (f'{{__name__="{TEMP}",gpu="0"}}', f'{{__name__="{CELSIUS}",gpu="0"}}'),
    # units
    (f"{UTIL} > 90", f"round({UTIL_RATIO} * 100, 0.0001) > 90"),
    (
        f"max_over_time({UTIL}[5m]) >= bool 55",
        f"round(max_over_time({UTIL_RATIO}[5m]) * 100, 0.0001) >= bool 55",
    ),
    (f"{UTIL} % 10", f"round({UTIL_RATIO} * 100, 0.0001) % 10"),
    (f"{ENERGY} % 1000", f"round({JOULES} * 1000, 0.0001) % 1000"),
    (f'count_values("v", {UTIL})', f'count_values("v", round({UTIL_RATIO} * 100, 0.0001))'),
    (f"sgn({UTIL} - 57)", f"sgn(round({UTIL_RATIO} * 100, 0.0001) - 57)"),
    (
        f"avg({UTIL}) + floor({UTIL})",
        f"avg(({UTIL_RATIO} * 100)) + floor(round({UTIL_RATIO} * 100, 0.0001))",
    ),
    (f"floor({USED})", f"floor(({USED_BYTES} / 1048576))"),
    (f"55 < avg({UTIL}) * 2", f"55 < avg(round({UTIL_RATIO} * 100, 0.0001)) * 2"),
    (f'{USED}{{gpu=~"$gpu"}}', f'({USED_BYTES}{{gpu=~"$gpu"}} / 1048576)'),
    (f"{USED} @ end() offset -1h", f"({USED_BYTES} @ end() offset -1h / 1048576)"),
    (f"-{UTIL}", f"-({UTIL_RATIO} * 100)"),
    (f"sum({UTIL}) by (gpu)", f"sum(({UTIL_RATIO} * 100)) by (gpu)"),
    # the result of a function over a range is converted
    (f"rate({ENERGY}[5m])", f"(rate({JOULES}[5m]) * 1000)"),
    (f"avg_over_time({UTIL}[$__range])", f"(avg_over_time({UTIL_RATIO}[$__range]) * 100)"),
    (f"quantile_over_time(0.9, {UTIL}[5m])", f"(quantile_over_time(0.9, {UTIL_RATIO}[5m]) * 100)"),
    (f"max_over_time({UTIL}[1h:1m])", f"max_over_time(({UTIL_RATIO} * 100)[1h:1m])"),
    # no conversion, because the result does not depend on the unit
    (f"count({UTIL})", f"count({UTIL_RATIO})"),
    (f'absent({UTIL}{{gpu="1"}})', f'absent({UTIL_RATIO}{{gpu="1"}})'),
    (f"changes({UTIL}[5m])", f"changes({UTIL_RATIO}[5m])"),
    (f"up and on (instance) {UTIL}", f"up and on (instance) ({UTIL_RATIO} * 100)"),
    # labels
    (f'{TEMP}{{Hostname=~"$node"}}', f'{CELSIUS}{{hostname=~"$node"}}'),
    (f"max by (Hostname, gpu) ({TEMP})", f"max by (hostname, gpu) ({CELSIUS})"),
    (
        f"max without (DCGM_FI_DRIVER_VERSION) ({TEMP})",
        f"max without (DCGM_FI_SYSTEM_DRIVER_VERSION) ({CELSIUS})",
    ),
    (
        f"{TEMP} * on (Hostname) group_left (Hostname) podgpu_device_count",
        f"{CELSIUS} * on (hostname) group_left (hostname) podgpu_device_count",
    ),
    (
        f'label_replace({TEMP}, "node", "$1", "Hostname", "(.*)")',
        f'label_replace({CELSIUS}, "node", "$1", "hostname", "(.*)")',
    ),
    (
        f'{TEMP} * on (Hostname) label_replace(kube_node_info, "Hostname", "$1", "node", "(.*)")',
        (
            f'{CELSIUS} * on (hostname) label_replace(kube_node_info, "hostname", "$1", "node", '
            '"(.*)")'
        ),
    ),
    (
        'sum by (Hostname) (ALERTS{alertname=~"Podgpu.*"})',
        'sum by (hostname) (ALERTS{alertname=~"Podgpu.*"})',
    ),
    (f'sort_by_label({TEMP}, "Hostname", "gpu")', f'sort_by_label({CELSIUS}, "hostname", "gpu")'),
    (
        f'label_join({TEMP}, "x", ",", "Hostname", "gpu")',
        f'label_join({CELSIUS}, "x", ",", "hostname", "gpu")',
    ),
    (f"max without (Hostname) ({TEMP})", f"max without (hostname) ({CELSIUS})"),
    (f"max({TEMP}) without (Hostname)", f"max({CELSIUS}) without (hostname)"),
    (f"{TEMP} + ignoring (Hostname) {TEMP}", f"{CELSIUS} + ignoring (hostname) {CELSIUS}"),
    # a label that the query itself sets
    (f'count_values("Hostname", {TEMP})', f'count_values("Hostname", {CELSIUS})'),
    (
        'sum by (Hostname) (label_replace(foo, "Hostname", "$1", "a", "(.*)") + bar)',
        'sum by (hostname) (label_replace(foo, "hostname", "$1", "a", "(.*)") + bar)',
    ),
    (
        'sum by (Hostname) (label_join(label_replace(foo, "Hostname", "$1", "a", ""), "b", ""))',
        'sum by (hostname) (label_join(label_replace(foo, "hostname", "$1", "a", ""), "b", ""))',
    ),
    (f"own_function({TEMP}[5m])", f"own_function({CELSIUS}[5m])"),
    # times
    (f"{TEMP} offset $interval", f"{CELSIUS} offset $interval"),
    (f"{TEMP} offset 300", f"{CELSIUS} offset 300"),
    (f"{TEMP} @ $time", f"{CELSIUS} @ $time"),
    (f"{TEMP} @ start()", f"{CELSIUS} @ start()"),
    (f"{TEMP} @ -5", f"{CELSIUS} @ -5"),
    (
        f"max_over_time({UTIL}[2 * 1h / 2 + 1m - 5])",
        (f"(max_over_time({UTIL_RATIO}[2 * 1h / 2 + 1m - 5]) * 100)"),
    ),
    # whitespace and comments are kept
    (f"{UTIL}  # busy\n  >   90", f"round({UTIL_RATIO} * 100, 0.0001)  # busy\n  >   90"),
    (f"( {TEMP}\n)", f"( {CELSIUS}\n)"),
]


@pytest.mark.parametrize(("old", "new"), REWRITTEN)
def test_rewritten_expressions(old: str, new: str) -> None:
    rewritten = rewrite_query(old)
    assert (rewritten.text, rewritten.unconverted) == (new, ())
    assert rewrite_query(new).text == new


@pytest.mark.parametrize(
    "text", ["rate(x_bucket[5m])", "DCGM_FI_PROF_PCIE_TX_BYTES", "1 + 1", '"x"']
)
def test_names_of_both_generations_stay(text: str) -> None:
    assert rewrite_query(text).text == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{__name__=~"DCGM_FI_DEV_GPU_.*"}', "by a pattern of names"),
        (f'{TEMP} or {{__name__!="x",gpu="1"}}', "by a pattern of names"),
        ('$metric{gpu="0"}', "contains a dashboard variable"),
        ("rate(DCGM_FI_DEV_${what}[5m])", "contains a dashboard variable"),
        (f"{TEMP} + ${{prefix}}_total", "contains a dashboard variable"),
        ('{__name__="DCGM_FI_DEV_[[m]]", gpu="0"}', "contains a dashboard variable"),
        ("{__name__=$metric}", "contains a dashboard variable"),
        ('{"DCGM_FI_DEV_${m}"}', "contains a dashboard variable"),
        ("label_values(Hostname)", "may belong to another exporter"),
        (
            'label_replace(foo, "node", "$1", "Hostname", "(.*)")',
            "may belong to another exporter",
        ),
        ('label_join(foo, "a", "-", "b", "Hostname")', "may belong to another exporter"),
        ('sort_by_label(foo, "Hostname")', "may belong to another exporter"),
        ("label_values($metric, Hostname)", "may belong to another exporter"),
        (f"{UTIL}[5m]", "a range without a function"),
        (f"own_function({UTIL}[5m])", "is unknown"),
        (f"avg by (__name__) ({UTIL})", "uses __name__"),
        (f'label_replace({UTIL}, "x", "$1", "__name__", "(.*)")', "uses __name__"),
        (f"{UTIL} * on (Hostname) kube_node_info", "has the label Hostname"),
        ("sum by (Hostname) (gpu:util:avg)", "may belong to another exporter"),
        (f'{TEMP} + on (gpu) foo{{Hostname="a"}}', "may belong to another exporter"),
        ("metrics(DCGM_FI_DEV_.*)", "by a pattern"),
        (
            'sum by (Hostname) (label_replace(foo, "a", "$1", "Hostname", ""))',
            "may belong to another exporter",
        ),
    ],
)
def test_an_expression_that_cannot_be_rewritten_stays_unchanged(text: str, words: str) -> None:
    rewritten = rewrite_query(text)
    assert rewritten.text == text
    assert words in " ".join(rewritten.unconverted)


def test_queries_of_variables() -> None:
    assert rewrite_query(f'label_values({UTIL}{{Hostname=~"$node"}}, gpu)').text == (
        f'label_values({UTIL_RATIO}{{hostname=~"$node"}}, gpu)'
    )
    assert (
        rewrite_query(f"label_values({TEMP}, Hostname)").text
        == f"label_values({CELSIUS}, hostname)"
    )
    assert (
        rewrite_query(f"query_result(max({UTIL}))").text
        == f"query_result(max(({UTIL_RATIO} * 100)))"
    )
    for text in (
        "label_values(gpu)",
        "label_values(hostname)",
        "$metric",
        "avg($metric) > $threshold",
        "label_values()",
    ):
        rewritten = rewrite_query(text)
        assert (rewritten.text, rewritten.unconverted) == (text, ())
    assert rewrite_query("label_names()").text == "label_names()"


def test_a_counter_that_is_no_default_one_is_noted() -> None:
    rewritten = rewrite_query("DCGM_FI_DEV_POWER_VIOLATION")
    assert rewritten.text == "(DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL * 1000000000)"
    assert "counter file" in rewritten.notes[0]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "sum(",
            "a b",
            "a{b}",
            'a{b="c"',
            "a[5m",
            "a[x]",
            "a offset",
            "a @",
            ")",
            "a +",
            "a by (x)",
        ),
        *('a{b="c" d="e"}', "a{b=c}", "SELECT 1 FROM t", "a ~ b", '"unclosed'),
        "(" * 2000 + "a" + ")" * 2000,
    ],
    ids=lambda text: text[:20],
)
def test_invalid_text_is_rejected_in_one_line(text: str) -> None:
    with pytest.raises(PromqlError) as raised:
        rewrite_query(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected an expression, but got the end"),
        ("sum(", "expected an expression, but got the end"),
        ("a b", "expected an operator or the end, but got 'b' at character 3"),
        ("(a", "expected ')', but got the end"),
        ("sum by + (a)", "expected '(', but got '+' at character 8"),
        ("sum by (1) (a)", "expected a label, but got '1' at character 9"),
        ("a{b}", "expected one of = != =~ !~, but got '}' at character 4"),
        ("a{b=1}", "expected a string, but got '1' at character 5"),
        ("a[x]", "expected ']', but got 'x' at character 3"),
        ("a offset b", "expected a duration, but got 'b' at character 10"),
        ("a @ b", "expected a time, but got 'b' at character 5"),
        ("a " + "b" * 50, f"expected an operator or the end, but got '{'b' * 40}' at character 3"),
        ("a ~ b", "cannot parse '~ b' at character 3"),
        ("(" * 2000 + "a", "nested too deep"),
    ],
)
def test_messages_about_invalid_text(text: str, message: str) -> None:
    with pytest.raises(PromqlError) as raised:
        rewrite_query(text)
    assert str(raised.value) == message


def test_messages_about_text_that_stays() -> None:
    problem = "has the label Hostname, which may belong to another exporter"

    def explain(text: str) -> tuple[str, ...]:
        return rewrite_query(text).unconverted

    assert explain("sum by   (Hostname)\n (foo)") == (f"sum by (Hostname) (foo): {problem}",)
    assert explain("bar + sum(foo) by (Hostname)") == (f"sum(foo) by (Hostname): {problem}",)
    long = "f" * (100 - len("sum by (Hostname) ()"))
    assert explain(f"sum by (Hostname) ({long})") == (f"sum by (Hostname) ({long}): {problem}",)
    assert explain(f"sum by (Hostname) ({long}f)") == (f"sum by (Hostname) ({long}…: {problem}",)
    assert explain('{__name__=~"DCGM_.*"} or {__name__=~"DCGM_.*"}') == (
        '{__name__=~"DCGM_.*"}: selects metrics by a pattern of names; rewrite it manually',
    )
    assert explain('{__name__=~"DCGM_.*"} or {__name__=~"foo"}') == (
        '{__name__=~"DCGM_.*"}: selects metrics by a pattern of names; rewrite it manually',
    )
    variable = "the metric's name is or contains a dashboard variable"
    assert explain("rate($metric[5m])") == (f"$metric: {variable}",)
    unit = "a range without a function cannot be converted to another unit"
    assert explain(f"{UTIL}[5m]") == (f"{UTIL}[5m]: {unit}",)
    assert explain("a + label_values(Hostname)") == (f"label_values(Hostname): {problem}",)


def test_old_names_in_a_text() -> None:
    text = f"{TEMP} of Hostname, see {UTIL}; DCGM_FI_DRIVER_VERSION, DCGM_FI_OTHER, {UTIL}"
    assert find_old_names(text) == [TEMP, UTIL, "DCGM_FI_DRIVER_VERSION"]


def test_edits_are_sorted_and_insertions_keep_their_order() -> None:
    edits = [Edit(5, 6, "F"), Edit(2, 2, "x"), Edit(2, 2, "a"), Edit(0, 1, "A")]
    assert apply_edits("abcdefg", edits) == "AbxacdeFg"
    assert apply_edits("ab", []) == "ab"


def test_a_long_chain_of_operators() -> None:
    assert rewrite_query(UTIL + " + a" * 2000).text == f"({UTIL_RATIO} * 100)" + " + a" * 2000


@pytest.mark.parametrize(
    "text",
    [
        "a:b:c{}",
        'a{b="c",}',
        "sum by () (a)",
        "a == bool on (b) group_right () c",
        "a[1h30m:]",
        "a[${range}:$step] offset $o",
        "a[[[range]]]",
        "1e-3 + 0x1F + Inf + NaN + .5",
        "a @ 1609746000 offset -5m",
        '{"quoted.name", "label.x"="y"}',
        "avg(a) BY (b) > 1 AND b UNLESS c OR d",
        "a atan2 b % c",
        "((((((((((((((((((((((((((((((a))))))))))))))))))))))))))))))",
        'count_values("v", a)',
        "sum by ($label) (a)",
        'a{b!~"c", d!="e"}',
    ],
)
def test_valid_text_is_parsed(text: str) -> None:
    rewrite_query(text)
