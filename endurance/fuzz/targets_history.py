"""Files of history, and what Prometheus answers when it is asked for the past."""

from __future__ import annotations

import json
import struct
import zlib
from random import Random

from endurance.fuzz.mutate import Case, Make, blobs, documents, either
from endurance.fuzz.target import Target
from podgpu.cluster.prom.answer import parse_matrix
from podgpu.cluster.prom.past import values_of
from podgpu.figures.waste import WasteLedger
from podgpu.history import frames
from podgpu.history.asking import Window
from podgpu.history.columns import NO_SAMPLE, Sample, pack, sample_at
from podgpu.history.rows import MOST_ROWS, Key
from podgpu.history.spans import Mark, Span
from podgpu.history.waste_file import dump_waste, load_waste
from podgpu.model import Workload

_AT = 1_794_744_000.0
_NAMES = [
    frames.Name(0, Key("GPU-0"), "node-1", 0, _AT),
    frames.Name(1, Key("GPU-0", "7", ("pod", "ns", "pod", "main")), "node-1", 0, _AT),
]
_SPANS = [
    (Key("GPU-0"), Span(_AT, Workload("ns", "pod", "main"), None)),
    (Key("GPU-0"), Span(_AT, Mark("xid", "XID 79"), _AT + 60)),
]
_COLUMN = pack([(0, Sample(0.5, 1 << 30, 300.0, 55)), (1, Sample(0.1))], 2)
_WHOLE = b"".join(
    [
        frames.head(),
        frames.names_frame(_NAMES),
        frames.spans_frame(_SPANS),
        *(frames.column_frame(kind, _AT, _COLUMN) for kind in ("fine", "coarse")),
    ]
)
_ROWS = [
    [[0, "GPU-0", "", [], "node-1", 0, _AT], [1, "GPU-0", "7", ["pod", "ns", "pod", "main"], "node-1", 0, _AT]],
    [
        ["GPU-0", "", _AT, None, "h", "ns", "pod", "main", "", "", ""],
        ["GPU-0", "", _AT, _AT + 60, "m", "xid", "XID 79"],
    ],
]


def _frame(kind: bytes, payload: bytes) -> bytes:
    """With the right checksum, whatever is in it."""
    return struct.pack("<4scII", b"\xf7PGH", kind, len(payload), zlib.crc32(payload, kind[0])) + payload


def _well_wrapped(rng: Random) -> bytes:
    """What a checksum vouches for, and no podgpu wrote."""
    rows = documents(_ROWS)(rng)
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    column = struct.pack("<d", rng.choice([_AT, -1e300, float("nan"), 0.0])) + blobs([_COLUMN])(rng)  # type: ignore[operator]
    kinds = [_frame(rng.choice([b"N", b"S", b"F", b"C", b"?"]), rng.choice([text, column])) for _ in range(4)]
    return frames.head() + b"".join([frames.names_frame(_NAMES), *kinds])


_MAKE: Make = either(blobs([_WHOLE], [b"\xf7PGH", frames.head(), b"podgpu history 2 little\n"]), _well_wrapped)


def segment(case: Case) -> object:
    assert isinstance(case, bytes)
    found = frames.load_segment(case)
    for column in found.columns:
        assert len(column.samples) % 8 == 0
        assert abs(column.at) < 1e12
        assert all(0 <= place < MOST_ROWS for place in column.names)
        for place in column.names:
            sample = sample_at(column.samples, place)
            assert sample == NO_SAMPLE or sample.utilization is None or 0 <= sample.utilization < 7
    for key, span in found.spans.values():
        assert key.uuid is not None
        assert span.end is None or span.end >= span.start
    return found


_MATRIX = {
    "status": "success",
    "data": {
        "resultType": "matrix",
        "result": [
            {"metric": {"UUID": "GPU-0", "GPU_I_ID": "7"}, "values": [[_AT, "0.5"], [_AT + 15, "NaN"]]},
            {"metric": {}, "values": []},
        ],
    },
    "warnings": ["a store was away"],
}


def past(case: Case) -> object:
    body = case if isinstance(case, bytes) else json.dumps(case).encode()
    found = parse_matrix(body, "http://prometheus")
    window = Window(_AT - 3600, 15, 240)
    for line in found.lines:
        assert len(values_of(line, window)) == window.count
    return found


_WASTE = {
    "written_at": _AT,
    "counting_since": _AT - 86_400,
    "currency": "USD",
    "pods": [
        ["ml", "train-0", "", "", "", "Job", "train", 7_207_200_000_000_000, 5_040_000_000, 10**30, None],
        ["", "", "job 7", "uid", "", "", "", 5040, 0, None, _AT - 60],
    ],
    "left": [["ml", "Deployment", "old", 10**18, 10**17, 10**28]],
}


def _waste_made(rng: Random) -> bytes:
    """With the right checksum, whatever is in it."""
    made = documents([_WASTE])(rng)
    text = made if isinstance(made, bytes) else json.dumps(made).encode()
    return b"podgpu waste 1 %08x\n" % zlib.crc32(text) + text


def _whole_waste() -> bytes:
    text = json.dumps(_WASTE).encode()
    return b"podgpu waste 1 %08x\n" % zlib.crc32(text) + text


def waste(case: Case) -> object:
    assert isinstance(case, bytes)
    earlier = load_waste(case)
    again = load_waste(dump_waste(earlier.statement, earlier.written_at))
    assert dict(again.statement.left) == dict(earlier.statement.left)
    ledger = WasteLedger()
    ledger.restore(earlier.statement, earlier.written_at, 1000.0, _AT)
    stated = ledger.statement(1000.0, _AT, earlier.statement.counting_since)
    assert all(0 <= pod.amounts.idle <= pod.amounts.allocated for pod in stated.pods)
    return earlier


HISTORY_TARGETS = (
    Target("a file of waste", either(_waste_made, blobs([_whole_waste()])), waste),
    Target("a file of history", _MAKE, segment),
    Target("prometheus: the past", either(documents([_MATRIX]), blobs([json.dumps(_MATRIX).encode()])), past),
)
