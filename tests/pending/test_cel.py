"""Selectors of devices in CEL: what matches, what does not, and what podgpu cannot decide."""

from __future__ import annotations

from fractions import Fraction

import pytest

from podgpu.pending.cel import UnknownExpression, matches
from podgpu.pending.dra_objects import DraDevice

OF = "device.attributes['gpu.nvidia.com']"
MEMORY = "device.capacity['gpu.nvidia.com'].memory"
DEVICE = DraDevice(
    "gpu.nvidia.com",
    "node-1",
    "gpu-3",
    {
        "gpu.nvidia.com/productName": "NVIDIA H100-80GB",
        "gpu.nvidia.com/index": 3,
        "gpu.nvidia.com/isIdle": True,
        "gpu.nvidia.com/peers": ("gpu-1", "gpu-2"),
        "resource.kubernetes.io/pcieRoot": "pci0000:01",
    },
    {"gpu.nvidia.com/memory": Fraction(80 * 2**30)},
)

MATCH = [
    "true",
    "device.driver == 'gpu.nvidia.com'",
    "device.driver != 'other'",
    f"{OF}.isIdle",
    f"{OF}['isIdle']",
    f"!(!{OF}.isIdle)",
    f"{OF}.index == 3",
    f"{OF}.index != 4",
    f"{OF}.index < 4",
    f"{OF}.index <= 3",
    f"{OF}.index > 2",
    f"{OF}.index >= 3",
    f"{OF}.index in [1, 3]",
    f"'productName' in {OF}",
    "'gpu.nvidia.com' in device.attributes",
    "'resource.kubernetes.io' in device.attributes",
    "!device.allowMultipleAllocations",
    f"{OF}.index == 3 && {OF}.isIdle",
    f"{OF}.index == 4 || {OF}.isIdle",
    # One operand decides, and the error of the other one does not matter.
    f"{OF}.missing == 1 || {OF}.isIdle",
    f"{OF}.isIdle || {OF}.missing == 1",
    f"{OF}.isIdle || size({OF}.index) > 1",
    f"{OF}.productName.startsWith('NVIDIA')",
    f"{OF}.productName.endsWith('80GB')",
    f"{OF}.productName.contains('H100')",
    f"{OF}.productName.lowerAscii() == 'nvidia h100-80gb'",
    f"{OF}.productName.matches('H100')",
    f"{OF}.productName.matches('^NVIDIA')",
    f"{OF}.productName.matches('80GB$')",
    f"{OF}.productName.matches('^NVIDIA H100-80GB$')",
    f"{OF}.productName.matches('^NVIDIA.*80GB$')",
    f"{OF}.productName.matches('^.*H100.*$')",
    f"{OF}.productName.matches('V.*H.*8')",
    f"{OF}.productName.matches('')",
    f"{MEMORY}.compareTo(quantity('80Gi')) == 0",
    f"{MEMORY}.compareTo(quantity('40Gi')) == 1",
    f"{MEMORY}.compareTo(quantity('141Gi')) == -1",
    f"{MEMORY}.isGreaterThan(quantity('79Gi'))",
    f"{MEMORY}.isLessThan(quantity('81Gi'))",
    f"{MEMORY}.compareTo(quantity('141Gi')) < -0",
    f"{OF}.index > -1",
    f"-{OF}.index == -3",
    "device.driver == 'gpu.nvidia.com' &&\n  true",
    "device.driver != '&& || ! ? : true'",
    f"has({OF}.productName)",
    f"has({OF}.productName) && {OF}.productName.contains('H100')",
    f"!has({OF}.missing)",
    f"!has({OF}.missing) || {OF}.missing == 1",
    "has(device.attributes['resource.kubernetes.io'].pcieRoot)",
    "!has(device.attributes['other.example.com'].model)",
    "!has(device.attributes.other.model)",
    "has(device.capacity['gpu.nvidia.com'].memory)",
    "!has(device.capacity['gpu.nvidia.com'].productName)",
    f"has({MEMORY}) && {MEMORY}.compareTo(quantity('64Gi')) >= 0",
    f"has({OF}.missing) ? {OF}.missing == 1 : {OF}.index == 3",
    f"{OF}.isIdle ? {OF}.index == 3 : {OF}.missing == 1",
    f"{OF}.isIdle?{OF}.index==3:size({OF}.index) > 1",
    f"!{OF}.isIdle ? size({OF}.index) > 1 : {OF}.index == 3",
    f"({OF}.isIdle ? 3 : 4) == {OF}.index",
    f"{OF}.index == ({OF}.isIdle ? 3 : 4)",
    f"{OF}.productName.startsWith({OF}.isIdle ? 'NVIDIA' : 'AMD')",
    # `?:` binds to the right, and weaker than `||`.
    "false ? false : false ? false : true",
    "true ? true : true ? false : false",
    "(true ? false : false) ? false : true",
    "false || true ? true : false",
    "true ? true || false : false",
    "false ? false : false || true",
    "true ? (false ? false : true) : false",
]
NO_MATCH = [
    "false",
    "device.driver == 'other'",
    f"{OF}.index < 3",
    f"{OF}.index > 3",
    f"{OF}.index <= 2",
    f"{OF}.index >= 4",
    f"{OF}.index in [1, 2]",
    f"!{OF}.isIdle",
    f"{OF}.isIdle && {OF}.index == 4",
    f"{OF}.index == 4 || {OF}.index == 5",
    f"'other' in {OF}",
    "'gpu' in device.attributes",
    "device.allowMultipleAllocations",
    # An attribute that the device lacks is an error in CEL, also if it should differ.
    f"{OF}.missing == 'x'",
    f"{OF}.missing != 'x'",
    f"!({OF}.missing == 'x')",
    f"{OF}.missing == 1 || {OF}.index == 4",
    f"{OF}.missing == 1 && {OF}.isIdle",
    f"{OF}.isIdle && {OF}.missing == 1",
    f"size({OF}.index) > 1 && {OF}.index == 4",
    f"{OF}.productName.matches('^H100')",
    f"{OF}.productName.matches('NVIDIA$')",
    f"{OF}.productName.matches('^NVIDIA H100$')",
    f"{OF}.productName.matches('^$')",
    f"{OF}.productName.matches('H.*NVIDIA')",
    f"{OF}.productName.matches('^NVIDIA.*H200')",
    f"{OF}.productName.matches('^NVIDIA.*A100.*$')",
    f"{MEMORY}.isGreaterThan(quantity('80Gi'))",
    f"{MEMORY}.isLessThan(quantity('80Gi'))",
    f"has({OF}.missing)",
    f"!has({OF}.productName)",
    f"has({OF}.missing) && {OF}.missing == 1",
    "has(device.attributes['other.example.com'].productName)",
    f"has({OF}.missing) ? {OF}.missing == 1 : {OF}.index == 4",
    f"{OF}.isIdle ? {OF}.index == 4 : true",
    # An error in the condition or in the chosen value is the result.
    f"{OF}.missing == 1 ? true : true",
    f"!({OF}.missing == 1 ? true : true)",
    f"{OF}.isIdle ? {OF}.missing == 1 : true",
    f"!({OF}.isIdle ? {OF}.missing == 1 : true)",
]
UNKNOWN = [
    f"{OF}.index",  # no condition
    f"{OF}.index && true",
    f"!{OF}.index",
    f"{OF}.index < 'three'",
    f"1 < {OF}.index < 4",
    "device.attributes == device.capacity",
    f"{OF} == 1",
    f"1 == {OF}",
    f"{OF}.index in 3",
    "device.name == 'gpu-0'",
    "other.driver == 'x'",
    "device.driver.length == 3",
    "device.driver['x'] == 1",
    "device.attributes[0].x == 1",
    f"size({OF}.index) > 1",
    f"{OF}.productName.upperAscii() == 'X'",
    f"{OF}.productName.lowerAscii(1) == 'x'",
    f"{OF}.productName.startsWith(3)",
    f"{OF}.productName.startsWith('a', 'b')",
    f"{OF}.productName.matches('a+')",
    f"{OF}.productName.matches('^(a|b)$')",
    f"{OF}.index.startsWith('3')",
    f"{MEMORY}.isGreaterThan('1Gi')",
    f"{MEMORY}.add(quantity('1Gi')) == 1",
    "quantity('80Gi') == quantity()",
    "quantity(80) == 1",
    "quantity('many') == 1",
    "f(x=1)",
    "[x for x in device.attributes] == 1",
    "device.driver ==",
    "(" * 5000,
    f"device.driver == '{'x' * 2000}'",
    "!" * 1900 + "true",
    "1.5 < 2.5",
    "-true == -1",
    "-device.driver == 'x'",
    "+1 == 1",
    # The unsupported operand could decide, in either order.
    f"{OF}.missing == 1 || size({OF}.index) > 1",
    f"size({OF}.index) > 1 || {OF}.missing == 1",
    f"!({OF}.missing == 1 && size({OF}.index) > 1)",
    f"!(size({OF}.index) > 1 && {OF}.missing == 1)",
    f"{OF}.isIdle == 1",
    f"0 < {OF}.isIdle",
    f"'gpu-1' in {OF}.peers",
    # CEL allows only the selection of a field in has().
    f"has({OF}['productName'])",
    f"has({OF})",
    "has('productName')",
    "has()",
    f"has({OF}.index, {OF}.isIdle)",
    f"has({OF}.productName.length)",
    "has(device.driver)",
    "has(device.attributes.example)",
    "has(other.driver)",
    f"{OF}.index ? true : true",
    f"{OF}.isIdle ? 1 : 2",
    f"size({OF}.index) > 1 ? true : true",
    f"{OF}.isIdle ? size({OF}.index) > 1 : true",
    "true ? true",
    "true : true",
    "{'a': true}['a']",
    f"{OF}[?'index'] == 3",
    f"{OF}.?index == 3",
]


@pytest.mark.parametrize("expression", MATCH)
def test_the_device_matches(expression: str) -> None:
    assert matches(expression, DEVICE)


@pytest.mark.parametrize("expression", NO_MATCH)
def test_the_device_does_not_match(expression: str) -> None:
    assert not matches(expression, DEVICE)


@pytest.mark.parametrize("expression", UNKNOWN, ids=lambda text: text[:40])
def test_what_podgpu_does_not_support_is_unknown(expression: str) -> None:
    with pytest.raises(UnknownExpression):
        matches(expression, DEVICE)


def test_a_device_that_several_claims_share() -> None:
    shared = DraDevice("gpu.nvidia.com", "node-1", "gpu-3", is_shared=True)
    assert matches("device.allowMultipleAllocations", shared)
