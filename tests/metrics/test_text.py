"""The encoder against the oracle: what we print, prometheus_client reads back unchanged."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from podgpu.metrics.text import encode, format_float
from podgpu.series import NO_LABELS, Family, Labels, Sample

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"))
LETTERS = string.ascii_letters + "_"
NAMES = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + string.digits, max_size=20)).filter(
    lambda name: not name.endswith(("_total", "_created"))
)


def test_as_dcgm_exporter_prints() -> None:
    labels = Labels([("gpu", "0"), ("UUID", "GPU-1")])
    family = Family("DCGM_X", "gauge", "Help.", (Sample(labels, 0.5), Sample(labels, 46)), dcgm_numbers=True)
    assert encode([family]) == (
        b"# HELP DCGM_X Help.\n# TYPE DCGM_X gauge\n"
        b'DCGM_X{gpu="0",UUID="GPU-1"} 0.500000\nDCGM_X{gpu="0",UUID="GPU-1"} 46\n'
    )


def test_other_numbers_are_the_shortest_that_read_back() -> None:
    family = Family("x", "gauge", "h", (Sample(NO_LABELS, 0.1),))
    assert encode([family]).endswith(b"\nx 0.1\n")


def test_a_family_without_samples_is_not_there() -> None:
    assert encode([Family("x", "gauge", "h", ())]) == b""


@pytest.mark.parametrize(
    ("value", "text"), [(math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"), (1e300, "1e+300")]
)
def test_special_numbers(value: float, text: str) -> None:
    assert format_float(value) == text


@given(
    st.dictionaries(NAMES.filter(lambda n: not n.startswith("__")), TEXT, max_size=5),
    st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False)),
    NAMES,
)
def test_labels_and_values_survive_the_oracle(labels: dict[str, str], value: float, name: str) -> None:
    exposition = encode([Family(name, "gauge", "help", (Sample(Labels(labels.items()), value),))]).decode()
    (family,) = text_string_to_metric_families(exposition)
    (sample,) = family.samples
    assert sample.name == name
    assert sample.labels == labels
    assert sample.value == value


@given(TEXT)
def test_help_is_one_line(text: str) -> None:
    exposition = encode([Family("x", "gauge", text, (Sample(NO_LABELS, 1),))]).decode()
    assert [line for line in exposition.split("\n") if line][1] == "# TYPE x gauge"
