"""The price file: strict parsing, reload after changes, and prices of MIG instances."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import UsageError, texts_of
from podgpu.fleet.prices import NO_PRICES, Price, Prices, parse_prices, read_prices
from podgpu.fleet.readings import NodeReading
from podgpu.labs.simulate.models import MODELS
from podgpu.metrics.fields import meaning
from tests.fleet.states import gpu, holder, mig, node, state_of

H100 = "NVIDIA H100 80GB HBM3"
WRONG_AMOUNTS = ("-1", ".nan", "free", "[1]", "0x10", "true")
GOOD = f"""
currency: EUR
models:
  "{H100}": {{gpu_hour: 2.5}}
  "*": {{gpu_hour: 1}}
"""


def test_the_documented_file() -> None:
    prices = parse_prices(GOOD.encode(), "p.yml")
    assert prices.currency == "EUR"
    assert prices.of(H100).gpu_hour == 2.5
    assert prices.of("NVIDIA A30") == Price(1.0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "missing required field `currency`"),
        ("currency: EUR", "missing required field `models`"),
        (
            "currency: EUR\nmodel: {}",
            "unknown field `model`; valid keys are currency, models, nodes, changes",
        ),
        *(
            (f"currency: EUR\nmodels: {{a: {{gpu_hour: {wrong}}}}}", "gpu_hour")
            for wrong in WRONG_AMOUNTS
        ),
        (
            "currency: EUR\nmodels: {a: {kwh: 1}}",
            "models[...]: object contains unknown field `kwh`; valid keys are gpu_hour",
        ),
        (
            f"{GOOD}nodes: [{{labels: {{a: b}}, price: 1}}]",
            "nodes[0]: object contains unknown field `price`; valid keys are labels, ",
        ),
        (
            f"{GOOD}changes: [{{from: 2026-01-01, model: {{}}}}]",
            "unknown field `model`; valid keys are from, ",
        ),
        ("currency: EUR\nmodels: {a: {gpu_hour: 1}", "not YAML"),
        (f"{GOOD}nodes: [{{labels: {{}}, factor: 1}}]", "nodes[0].labels: "),
        (f"{GOOD}nodes: [{{labels: {{spot: true}}, factor: 1}}]", "nodes[0].labels"),
        (f"{GOOD}nodes: [{{labels: {{a: b}}, factor: -1}}]", "nodes[0].factor: "),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(content: str, complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_prices(content.encode(), "p.yml")
    assert str(refused.value).startswith("p.yml: ")
    assert complaint in str(refused.value)


def test_invented_models_do_not_fill_the_memory() -> None:
    prices = parse_prices(GOOD.encode(), "p.yml")
    tracemalloc.start()
    for number in range(10_000):
        assert prices.of(f"{number:0256}") == Price(1.0)
        assert meaning(f"DCGM_FI_{number:0256}") is None
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 5_000_000, "without a limit, 10 MB"


def test_prices_that_change_at_a_date() -> None:
    december = 1_796_083_200.0
    content = f"{GOOD}changes:\n  - from: 2026-12-01\n    models: {{'*': {{gpu_hour: 3}}}}\n"
    prices = parse_prices(content.encode(), "p.yml")
    assert [prices.at(december + seconds).of("A30").gpu_hour for seconds in (-1, 0)] == [1.0, 3.0]
    assert prices.at(december).of(H100).gpu_hour == 2.5, (
        "models that the entry does not name keep their price"
    )
    parts = [
        (start, end, part.of("A30").gpu_hour)
        for start, end, part in prices.periods(december - 9, december + 9)
    ]
    assert parts == [(december - 9, december, 1.0), (december, december + 9, 3.0)]
    assert len(list(prices.periods(december, december + 9))) == 1


def test_prices_of_nodes_with_labels() -> None:
    december = 1_796_083_200.0
    spot, reserved = {"capacity": "spot", "zone": "b"}, {"capacity": "reserved"}
    content = f"""{GOOD}
nodes:
  - {{labels: {{capacity: spot, zone: b}}, factor: 0.4}}
  - {{labels: {{capacity: reserved}}, models: {{"{H100}": {{gpu_hour: 1.5}}}}}}
changes:
  - {{from: 2026-12-01, models: {{"*": {{gpu_hour: 2}}}}}}
  - {{from: 2026-12-02, nodes: []}}
"""
    prices = parse_prices(content.encode(), "p.yml")
    assert prices.label_names == ["capacity", "zone"]

    def find(model: str, at: float) -> list[float | None]:
        nodes: tuple[Any, ...] = ({**spot, "other": "x"}, {"capacity": "spot"}, reserved, {}, None)
        return [prices.at(at).on_node(labels).of(model).gpu_hour for labels in nodes]

    assert find(H100, 0.0) == [1.0, 2.5, 1.5, 2.5, None], (
        "without node labels, the price is unknown"
    )
    assert find(f"{H100} MIG 7g.80gb", 0.0)[2:] == [1.5, 2.5, None]
    assert find("A30", december) == [0.8, 2.0, 2.0, 2.0, None]
    assert find("A30", december + 86_400) == [2.0] * 5, (
        "without prices by label, no node labels are needed"
    )


def notes(prices: Prices, *nodes: NodeReading) -> list[str]:
    return texts_of(state_of(*nodes, prices=prices).notes)


def test_a_note_names_the_models_without_a_price() -> None:
    cut = gpu(1, instances=(mig(1, holder()),), model="A30")
    unknown = gpu(2, model="")
    node_of = node("n1", gpu(0), cut, unknown)
    assert notes(Prices("EUR", {"*": Price(1.0)}), node_of) == []
    [note] = notes(Prices("EUR", {H100: Price(1.0)}), node_of)
    assert note.startswith(
        "there is no price for A30, A30 MIG 1g.10gb, devices of an unknown model: "
    )
    assert note.endswith("add them to the file of --prices")
    [note] = notes(Prices("EUR", {"A30": Price(1.0)}, "example"), node("n1", gpu(0)))
    assert note.startswith(f"there is no price for {H100}: ")
    assert note.endswith("write your own price file")
    assert notes(NO_PRICES, node_of) == []


def test_a_note_names_the_nodes_and_labels_on_which_prices_depend() -> None:
    every = {"*": Price(1.0)}
    prices = Prices("EUR", every, nodes=[({"capacity": "spot"}, Prices("EUR", every))])
    spot = node("n1", gpu(0), labels={"capacity": "spot"})
    assert notes(prices, spot) == []
    [note] = notes(prices, spot, node("n2", gpu(1)))
    assert note.startswith("prices depend on node labels, but the labels of n2 are unknown")
    [note] = notes(prices, node("n1", gpu(0), labels={"zone": "b"}))
    assert note.startswith("no node has the label capacity of the price file")
    [note] = notes(prices, node("n1", gpu(0)))
    assert note.startswith("prices depend on node labels, but the labels of n1 are unknown")


@given(
    st.binary(max_size=60)
    | st.text(alphabet="curenymodls:{}[]*\"' \n-0.5&?|>", max_size=60).map(str.encode)
)
def test_no_file_makes_it_fall_over(content: bytes) -> None:
    with suppress(UsageError):
        parse_prices(content, "p.yml")


def test_a_mig_instance_costs_its_slices() -> None:
    prices = Prices(
        "EUR",
        {
            H100: Price(7.0),
            "NVIDIA A30": Price(4.0),
            f"{H100} MIG 3g.40gb": Price(9.0),
            "*": Price(14.0),
        },
    )
    assert prices.of(f"{H100} MIG 1g.10gb") == Price(1.0)
    assert prices.of(f"{H100} MIG 2g.20gb+me").gpu_hour == pytest.approx(2)
    assert prices.of(f"{H100} MIG 3g.40gb") == Price(9.0)
    assert prices.of("NVIDIA A30 MIG 1g.6gb").gpu_hour == 1  # divided into four instances
    assert prices.of("NVIDIA H200 MIG 1g.18gb").gpu_hour == pytest.approx(2)
    assert prices.of(f"{H100} MIG odd") == Price()


def test_blanks_written_as_dashes() -> None:
    prices = parse_prices(GOOD.encode(), "p.yml")
    assert prices.of("NVIDIA-H100-80GB-HBM3") == prices.of(H100)
    assert Prices("EUR", {}).of("*") == Price()


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "prices.yml"
    file.write_text(GOOD, encoding="utf-8")
    read = read_prices(str(file))
    assert (read()[0].of(H100).gpu_hour, read()[1]) == (2.5, ())
    file.write_text(GOOD.replace("2.5", "3.5"), encoding="utf-8")
    assert read()[0].of(H100).gpu_hour == 3.5
    file.write_text(GOOD.replace("2.5", "-1"), encoding="utf-8")
    kept, (note,) = read()
    assert kept.of(H100).gpu_hour == 3.5
    assert "expected `float` >= 0" in note.text
    file.write_text(GOOD.replace("2.5", "dear"), encoding="utf-8")
    other = read()[1][0]
    assert other.key != note.key, "a mistake in a new file is logged"
    assert read()[1][0] == other
    file.unlink()
    kept, (note,) = read()
    assert kept.of(H100).gpu_hour == 3.5
    assert "does not exist" in note.text
    file.write_text(GOOD, encoding="utf-8")
    assert (read()[0].of(H100).gpu_hour, read()[1]) == (2.5, ())


def test_a_wrong_file_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--prices: .*does not exist.*; for built-in prices, write example"
    ):
        read_prices(str(tmp_path / "none.yml"))
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("currency: EUR", encoding="utf-8")
    with pytest.raises(UsageError, match="required field `models`"):
        read_prices(str(wrong))
    wrong.write_bytes(b"#" * 300_000)
    with pytest.raises(UsageError, match=r"--prices: .*larger than the limit of 262144 bytes"):
        read_prices(str(wrong))


def test_the_example_has_every_model_that_can_be_simulated_and_says_what_it_is() -> None:
    prices, _ = read_prices("example")()
    assert (prices.currency, prices.source) == ("USD", "example")
    assert [model.name for model in MODELS.values() if not prices.of(model.name).gpu_hour] == []
    assert "*" not in prices.models, "a model without a price must stay visible"
    for model in ("NVIDIA GH200 480GB", "NVIDIA A10G", "NVIDIA-A100-SXM4-80GB", "Tesla T4"):
        assert prices.of(model).gpu_hour
