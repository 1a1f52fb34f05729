"""Cost and energy per token: from engines' counters to the bill, on whole and shared GPUs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.charge import Amounts, Charge, HeldTime, Tokens, UsageAccount, charge
from podgpu.fleet.parts import EngineState
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.tokens import charge_tokens
from podgpu.model import DeviceTotals
from podgpu.past.bills.focus import encode_csv
from podgpu.past.bills.token_costs import make_token_figures, sum_engines
from podgpu.past.bills.token_fit import TokenFit
from podgpu.web.exporter_app import application
from tests.fleet.states import gpu, holder
from tests.fleet.test_ranges import Cluster
from tests.nodes.node import Description, Node, node_of
from tests.web.server import Client, running

HOUR = 3600
MEASURED = DeviceTotals(method="exact")


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    """A node whose exporter serves the history of `Cluster`."""
    with node_of(Description(about="one GPU", gpus="1xH100"), folder) as built:
        yield built


def engine(prompt: float, generated: float, model: str = "llama", reason: str = "") -> EngineState:
    models = tuple(filter(None, [model]))
    return EngineState("vllm", models, Tokens(prompt, generated), reason=reason)


def at(seconds: float, pod: str, busy: float, waited: float = 0.0, **more: Any) -> Any:
    """Returns a holder whose counters have run for `seconds`."""
    return holder(
        pod,
        utilization_ratio=busy,
        busy_ns=int(busy * seconds * 1e9),
        idle_ns=0,
        wait_ns=int(waited * seconds * 1e9),
        energy_mj=int(400_000 * busy * seconds),
        allocated_ns=int(seconds * 1e9),
        **more,
    )


def an_hour(cluster: Cluster) -> None:
    """`chat` and `code` share a GPU. `batch` has two GPUs, and `train` has one without an engine."""
    for number in range(241):
        seconds = number * 15.0
        shared = gpu(
            0,
            at(seconds, "chat", 0.3, waited=0.1, share=0.5),
            at(seconds, "code", 0.6, share=0.5),
            busy=0.9,
            usage=MEASURED,
        )
        batch = at(seconds, "batch", 0.8)
        cluster.round(
            shared,
            gpu(1, batch, busy=0.8, usage=MEASURED),
            gpu(2, batch, busy=0.8, usage=MEASURED),
            gpu(3, at(seconds, "train", 1.0), busy=1.0, usage=MEASURED),
            gpu(4),
            engines={
                ("ml", "chat", "main"): engine(100.0 * seconds, 50.0 * seconds),
                ("ml", "code", "main"): engine(10.0 * seconds, 90.0 * seconds, "coder"),
                ("ml", "batch", "main"): engine(1001.0 * number, 0.0),
            },
        )


def test_tokens_and_cost_of_each_pod() -> None:
    cluster = Cluster()
    an_hour(cluster)
    rows = cluster.rows(seconds=HOUR)
    chat = rows["ml/chat"]
    assert (chat.model, chat.prompt_tokens, chat.generated_tokens) == ("llama", 360_000, 180_000)
    assert chat.tokens is not None
    assert chat.cost == 5.0
    assert msgspec.to_builtins(chat.tokens) == {
        "per_second": 150.0,
        "per_used_gpu_second": 500.0,
        "joules_per_token": 0.8,
        "cost": {"total": 5.0, "used": 3.0, "waiting": 1.0, "idle": 1.0, "unknown": 0.0},
        "cost_per_million": {
            "total": 9.2593,
            "used": 5.5555,
            "waiting": 1.8519,
            "idle": 1.8519,
            "unknown": 0.0,
        },
        "cost_per_million_at_use": 5.5556,
        "per_million_reason": "prompt and generated tokens always had the same ratio",
    }

    # It used more than its share: its bill is all use, and it did not pay for the rest.
    code = rows["ml/code"].tokens
    assert code is not None
    assert code.cost is not None
    assert (code.cost.total, code.cost.used, code.cost.waiting, code.cost.idle) == (5, 5, 0, 0)
    assert code.cost_per_million_at_use == pytest.approx(6.0 / 0.36, abs=1e-4)

    batch = rows["ml/batch"]
    assert (batch.prompt_tokens, batch.generated_tokens) == (240_240, 0)
    assert batch.cost == 20.0
    train = rows["ml/train"]
    assert (train.prompt_tokens, train.tokens, train.model) == (None, None, "")


def test_the_parts_of_all_pods_and_the_rest_are_the_bill_of_the_device() -> None:
    cluster = Cluster()
    for number in range(241):
        seconds = number * 15.0
        shared = gpu(
            0,
            at(seconds, "chat", 0.3, waited=0.1, share=0.4),
            at(seconds, "code", 0.6, share=0.3),
            busy=0.9,
            usage=MEASURED,
        )
        states = {
            ("ml", "chat", "main"): engine(seconds, seconds),
            ("ml", "code", "main"): engine(seconds, seconds),
        }
        cluster.round(shared, engines=states)
    answer = cluster.range(seconds=HOUR)
    parts: list[float] = []
    for row in answer.rows:
        if row.tokens is None:
            assert row.unallocated
            assert row.cost == 3.0
            parts.append(row.cost)
        else:
            assert row.tokens.cost is not None
            parts += [row.tokens.cost.used, row.tokens.cost.waiting, row.tokens.cost.idle]
    assert parts == pytest.approx([3.0, 1.0, 0.0, 3.0, 0.0, 0.0, 3.0])
    assert math.fsum(parts) == answer.totals.cost == 10.0


def test_a_model_and_an_owner_are_summed_over_their_pods() -> None:
    """Disaggregated serving: one pod reads the prompts, the other one generates."""
    cluster = Cluster()
    for number in range(241):
        seconds = number * 15.0
        cluster.round(
            gpu(0, at(seconds, "a", 0.5), busy=0.5, usage=MEASURED),
            gpu(1, at(seconds, "b", 0.5), busy=0.5, usage=MEASURED),
            gpu(2, at(seconds, "other", 0.5), busy=0.5, usage=MEASURED),
            engines={
                ("ml", "a", "main"): engine(300.0 * seconds, 0.0),
                ("ml", "b", "main"): engine(0.0, 100.0 * seconds),
            },
        )
    for by, name in (("model", "ml/llama"), ("owner", "ml/Job/train")):
        row = cluster.rows(by, seconds=HOUR)[name]
        assert (row.prompt_tokens, row.generated_tokens, row.cost) == (1_080_000, 360_000, 20.0)
        assert row.tokens is not None
        assert row.tokens.cost_per_million is not None
        assert row.tokens.cost_per_million.total == pytest.approx(20 / 1.44, abs=1e-4)
    assert {row.model for row in cluster.range("model", seconds=HOUR).rows} == {"llama", ""}
    # The pod without an engine is in the namespace, and not in the cost of its tokens.
    space = cluster.rows("namespace", seconds=HOUR)["ml"]
    assert space.cost == 30.0
    assert space.tokens is not None
    assert space.tokens.cost is not None
    assert space.tokens.cost.total == 20.0


def test_other_containers_of_a_pod_belong_to_its_cost_per_token() -> None:
    cluster = Cluster()
    for number in range(241):
        seconds = number * 15.0
        second = at(seconds, "a", 0.1, container="reranker")
        failed = engine(1.0, 1.0, reason="no_tokens")
        cluster.round(
            gpu(0, at(seconds, "a", 0.5), busy=0.5, usage=MEASURED),
            gpu(1, second, busy=0.1, usage=MEASURED),
            engines={
                ("ml", "a", "main"): engine(100.0 * seconds, 0.0),
                ("ml", "a", "reranker"): msgspec.structs.replace(failed, engine=""),
            },
        )
    tokens = cluster.rows(seconds=HOUR)["ml/a"].tokens
    assert tokens is not None
    assert tokens.cost_per_million is not None
    assert tokens.cost_per_million.total == pytest.approx(20 / 0.36, abs=1e-3)
    assert tokens.per_used_gpu_second == pytest.approx(100 / 0.6, rel=1e-3)


def changing_load(cluster: Cluster, rounds: int = 2 * 241) -> None:
    """A prompt token needs 1 ms of the GPU, and a generated one 4 ms."""
    random = Random(3)
    prompt = generated = busy = 0.0
    for number in range(rounds):
        seconds = number * 15.0
        if number % 20 == 0:  # the load changes every 5 minutes
            parts = random.uniform(0.1, 0.4), random.uniform(0.1, 0.4)
        prompt += round(parts[0] * 15 * 1000)
        generated += round(parts[1] * 15 * 250)
        busy = prompt / 1000 + generated / 250
        one = at(seconds, "a", 0.5)
        usage = msgspec.structs.replace(one.usage, busy_ns=round(busy * 1e9))
        one = msgspec.structs.replace(one, usage=usage)
        cluster.round(
            gpu(0, one, busy=0.5, usage=MEASURED),
            engines={("ml", "a", "main"): engine(prompt, generated)},
        )


def test_prompt_and_generated_tokens_have_a_cost_of_their_own() -> None:
    cluster = Cluster()
    changing_load(cluster)
    for by in ("pod", "model", "owner"):
        (tokens,) = [row.tokens for row in cluster.range(by, seconds=2 * HOUR).rows if row.tokens]
        split = tokens.per_million
        assert split is not None
        assert split.prompt_gpu_seconds == pytest.approx(1000, rel=0.01)
        assert split.generated_gpu_seconds == pytest.approx(4000, rel=0.01)
        assert split.prompt_cost == pytest.approx(1000 * 10 / 3600, rel=0.01)
        assert split.generated_cost == pytest.approx(4000 * 10 / 3600, rel=0.01)
        assert split.residual_ratio < 0.01
        assert split.steps >= 20
        assert tokens.per_million_reason == ""


def tokens_of(client: Client, pod: str) -> Any:
    """Returns the tokens of the pod in its summary. Those of the range are equal."""
    summary = json.loads(client.ask(f"/api/v1/summary/ml/{pod}").body)["tokens"]
    rows = json.loads(client.ask("/api/v1/range?range=24h").body)["rows"]
    [row] = [row for row in rows if row.get("pod") == pod]
    for name in ("per_million", "per_million_reason"):
        assert summary.get(name) == row["tokens"].get(name)
    return summary


def test_the_summary_of_a_pod_has_them_too_over_http(node: Node) -> None:
    cluster = Cluster()
    changing_load(cluster)
    with running(node.agent, app=partial(application, past=cluster.past)) as client:
        tokens = tokens_of(client, "a")
    assert tokens["per_million"]["prompt_cost"] == pytest.approx(1000 * 10 / 3600, rel=0.01)
    assert tokens["per_million"]["generated_cost"] == pytest.approx(4000 * 10 / 3600, rel=0.01)
    assert tokens["per_million"]["residual_ratio"] < 0.01
    assert "per_million_reason" not in tokens


def test_the_summary_of_a_pod_says_why_they_are_absent_over_http(node: Node) -> None:
    cluster = Cluster()
    an_hour(cluster)
    with running(node.agent, app=partial(application, past=cluster.past)) as client:
        chat = tokens_of(client, "chat")
        batch = tokens_of(client, "batch")
    assert chat["per_million_reason"] == "prompt and generated tokens always had the same ratio"
    assert batch["per_million_reason"] == "there were no generated tokens"
    assert "per_million" not in chat
    assert "per_million" not in batch

    short = Cluster()
    changing_load(short, rounds=100)
    with running(node.agent, app=partial(application, past=short.past)) as client:
        tokens = tokens_of(client, "a")
    assert "needs 12 periods of 5 minutes with work, and" in tokens["per_million_reason"]


def test_tokens_per_second_of_a_history_that_is_shorter_than_the_range() -> None:
    cluster = Cluster()
    an_hour(cluster)
    tokens = cluster.rows(seconds=10 * HOUR)["ml/chat"].tokens
    assert tokens is not None
    assert tokens.per_second == pytest.approx(150.0, rel=0.01)


def test_figures_are_absent_with_a_reason() -> None:
    cluster = Cluster()
    quiet = {("ml", "a", "main"): engine(0.0, 0.0)}
    for number in range(20):
        seconds = number * 15.0
        cluster.round(gpu(0, at(seconds, "a", 0.0), busy=0.0, usage=MEASURED), engines=quiet)
    tokens = cluster.rows(seconds=HOUR)["ml/a"].tokens
    assert tokens is not None
    assert tokens.reason == "there were no tokens in this range"
    assert tokens.cost_per_million is None
    assert tokens.cost is not None

    for number in range(20, 40):
        seconds = number * 15.0
        failed = {("ml", "a", "main"): engine(0.0, 0.0, reason="timeout")}
        cluster.round(gpu(0, at(seconds, "a", 0.5), busy=0.5, usage=MEASURED), engines=failed)
    late = {("ml", "a", "main"): engine(500.0, 500.0)}
    cluster.round(gpu(0, at(600.0, "a", 0.5), busy=0.5, usage=MEASURED), engines=late)
    row = cluster.rows(seconds=HOUR)["ml/a"]
    assert (row.prompt_tokens, row.generated_tokens) == (500, 500), "nothing is lost meanwhile"
    assert row.tokens is not None
    assert "tokens were read in 50% of the allocated time only" in row.tokens.reason
    assert row.tokens.per_second is None


def test_without_prices_there_are_tokens_and_energy() -> None:
    cluster = Cluster(prices=Prices("", {}))
    an_hour(cluster)
    tokens = cluster.rows(seconds=HOUR)["ml/chat"].tokens
    assert tokens is not None
    assert (tokens.cost, tokens.cost_per_million, tokens.reason) == (None, None, "")
    assert tokens.joules_per_token == 0.8


def test_a_gpu_without_a_price_has_no_cost_per_token() -> None:
    cluster = Cluster(prices=Prices("EUR", {"other": Price(1.0)}))
    an_hour(cluster)
    tokens = cluster.rows(seconds=HOUR)["ml/chat"].tokens
    assert tokens is not None
    assert (tokens.cost, tokens.cost_per_million) == (None, None)
    assert tokens.reason == "some of these GPUs have no price in EUR"
    assert tokens.cost_per_million_at_use is None


def test_an_unknown_use_is_a_part_of_its_own() -> None:
    amounts = Amounts(
        allocated_seconds=10.0,
        cost=1.0,
        measured_seconds=5.0,
        busy_seconds=2.0,
        prompt_tokens=4.0,
        token_seconds=10.0,
    )
    sums = sum_engines([Charge(UsageAccount("ml", "a"), amounts=amounts, currency="EUR")], "EUR")
    assert sums is not None
    assert sums.cost == pytest.approx((0.2, 0.0, 0.3, 0.5))
    figures = make_token_figures(sums, "EUR", 60.0)
    assert figures.per_used_gpu_second is None
    assert figures.cost_per_million_at_use is None
    assert figures.cost_per_million is not None


@pytest.mark.parametrize(("currency", "is_priced"), [("EUR", True), ("USD", False)])
def test_kinds_of_tokens_have_a_cost_only_with_a_price(currency: str, is_priced: bool) -> None:
    amounts = Amounts(
        allocated_seconds=10.0,
        cost=1.0,
        measured_seconds=10.0,
        busy_seconds=5.0,
        prompt_tokens=4.0,
        generated_tokens=4.0,
        token_seconds=10.0,
    )
    usage = [Charge(UsageAccount("ml", "a"), amounts=amounts, currency="EUR")]
    sums = sum_engines(usage, currency)
    assert sums is not None
    fit = TokenFit(prompt=0.25, generated=1.0, residual_ratio=0.1, steps=20)
    split = make_token_figures(sums, currency, 60.0, fit).per_million
    assert split is not None
    costs = (split.prompt_cost, split.generated_cost)
    if is_priced:
        assert costs == pytest.approx((25_000.0, 100_000.0))
    else:
        assert costs == (None, None)


def test_a_range_without_a_length_has_no_rate() -> None:
    amounts = Amounts(allocated_seconds=10.0, prompt_tokens=4.0, token_seconds=10.0)
    sums = sum_engines([Charge(UsageAccount("ml", "a"), amounts=amounts)], "")
    assert sums is not None
    assert make_token_figures(sums, "", 0.0).per_second is None
    assert make_token_figures(sums, "", 2.0).per_second == 2.0


def test_tokens_in_the_csv() -> None:
    cluster = Cluster()
    an_hour(cluster)
    cells = {
        row["x_Pod"]: row
        for row in csv.DictReader(io.StringIO(encode_csv([cluster.range(seconds=HOUR)]).decode()))
    }
    chat = cells["chat"]
    assert (chat["x_PromptTokens"], chat["x_GeneratedTokens"]) == ("360000", "180000")
    assert chat["x_Model"] == "llama"
    assert chat["x_CostPerMillionTokens"] == "9.2593"
    assert chat["x_JoulesPerToken"] == "0.8"
    assert cells["train"]["x_PromptTokens"] == cells["train"]["x_CostPerMillionTokens"] == ""


def test_the_history_keeps_tokens_and_models(tmp_path: Any) -> None:
    cluster = Cluster(str(tmp_path))
    an_hour(cluster)
    before = cluster.rows(seconds=HOUR)["ml/chat"]
    cluster.recorder.stop()
    again = Cluster(str(tmp_path), at=cluster.at)
    again.world = cluster.world
    assert again.rows(seconds=HOUR)["ml/chat"] == before
    assert isinstance(json.loads(msgspec.json.encode(before))["prompt_tokens"], int)


@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 1),
            st.floats(0, 1),
            st.floats(0, 1),
            st.floats(0, 1),
            st.integers(0, 10**9),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_parts_always_add_up_to_the_bill(
    pods: list[tuple[float, float, float, float, int]],
) -> None:
    usage = []
    for number, (share, busy, idle, waited, tokens) in enumerate(pods):
        time = HeldTime(
            60.0,
            share,
            busy=60 * busy,
            idle=60 * idle,
            waited=60 * waited,
            tokens=Tokens(tokens, tokens),
        )
        account = UsageAccount("ml", f"p{number}")
        usage.append(Charge(account, amounts=charge(time, 1.0, 7.3), currency="EUR"))
    sums = sum_engines(usage, "EUR")
    assert sums is not None
    assert min(sums.cost) >= 0
    assert sums.cost.total == pytest.approx(math.fsum(one.amounts.cost for one in usage))
    figures = make_token_figures(sums, "EUR", 60.0)
    for cost in (figures.cost, figures.cost_per_million):
        if cost is not None:
            parts = math.fsum([cost.used, cost.waiting, cost.idle, cost.unknown])
            assert parts == pytest.approx(cost.total, abs=1e-9, rel=1e-12)


def test_tokens_wait_for_a_round_that_is_charged() -> None:
    cluster = Cluster()
    name = ("ml", "a", "main")
    for seconds in (0.0, 15.0):
        cluster.round(
            gpu(0, at(seconds, "a", 0.5), busy=0.5, usage=MEASURED),
            engines={name: engine(7.0, 3.0)},
        )
    state = cluster.state()
    assert state.charged_tokens == {name: (7.0, 3.0)}
    bare = [msgspec.structs.replace(state.nodes[0], held=())]
    _, charged = charge_tokens(bare, {name: engine(9.0, 3.0)}, state.charged_tokens)
    assert charged == {name: (7.0, 3.0)}
    assert charge_tokens(bare, {}, charged) == (bare, charged)


def test_all_tokens_go_to_the_gpus_that_are_charged() -> None:
    """A pod has two GPUs. One of them is new in this round, and is not charged yet."""
    cluster = Cluster()
    name = ("ml", "a", "main")
    for seconds, count in ((0.0, 1), (15.0, 1), (30.0, 2)):
        one = at(seconds, "a", 0.5)
        gpus = [gpu(number, one, busy=0.5, usage=MEASURED) for number in range(count)]
        cluster.round(*gpus, engines={name: engine(4 * seconds, 2 * seconds)})
    [node] = cluster.state().nodes
    old, new = sorted(node.held, key=lambda part: part.gpu.uuid)
    assert old.spent is not None
    assert old.spent.tokens == (60, 30)
    assert new.spent is None
    assert cluster.state().charged_tokens == {name: (120, 60)}
