"""tensors.json: the tensors of a run, in one order, with every size checked."""

from typing import Any

import pytest
import rfc8785

from tests.support.samples import every_dtype_table
from vllm_delta_sync.errors import DeltaSyncError, FormatError, LimitError, TensorMismatchError, UnsupportedError
from vllm_delta_sync.format.table import TensorSpec, TensorTable

ROW = {"name": "w", "dtype": "BF16", "shape": [2, 3]}


def document(*rows: Any, **fields: Any) -> bytes:
    return rfc8785.dumps({"format_version": 2, "tensors": list(rows), **fields})


def test_round_trip_and_totals() -> None:
    table = every_dtype_table(10)
    again = TensorTable.from_bytes(table.to_bytes())
    assert again.specs == table.specs
    assert again.digest == table.digest
    assert table.total == 10 * 16 + 1
    assert table.full_bytes == sum(spec.nbytes for spec in table)
    assert [again.index(spec.name) for spec in again] == list(range(len(again)))
    assert TensorTable.from_bytes(document()).total == 0


def test_order_is_that_of_utf8_bytes() -> None:
    names = ["b", "a.10", "a.9", "Z", "é", "𐀀", "￿"[:0] + "\uffdc", "a"]
    table = TensorTable(TensorSpec(name, "U8", (1,)) for name in names)
    assert [spec.name for spec in table] == sorted(names, key=lambda name: name.encode())
    assert TensorTable.from_bytes(table.to_bytes()).specs == table.specs


def test_unknown_tensors_and_contents() -> None:
    table = TensorTable.from_bytes(document(ROW))
    assert "w" in table
    assert "v" not in table
    assert table.by_name("w").nbytes == 12
    with pytest.raises(TensorMismatchError, match=r"tensor 'v' is not in this run's tensor table of 1 tensors"):
        table.index("v")


def test_fields_of_a_later_release_are_ignored_but_stay_in_the_digest() -> None:
    data = document({**ROW, "later": 1}, also_later=True)
    table = TensorTable.from_bytes(data)
    assert table.specs == TensorTable.from_bytes(document(ROW)).specs
    assert table.to_bytes() == data
    assert table.digest != TensorTable.from_bytes(document(ROW)).digest


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (document(format_version=3), UnsupportedError),
        (document(format_version=True), FormatError),
        (document(tensors={}), FormatError),
        (rfc8785.dumps([]), FormatError),
        (rfc8785.dumps({"format_version": 2}), FormatError),
        (document("w"), FormatError),
        (document({"name": "w", "dtype": "BF16"}), FormatError),
        (document({**ROW, "name": 1}), FormatError),
        (document({**ROW, "shape": "2"}), FormatError),
        (document({**ROW, "shape": [2.5]}), FormatError),
        (document({**ROW, "shape": [True]}), FormatError),
        (document({**ROW, "shape": [-1]}), LimitError),
        (document({**ROW, "shape": [2**48 + 1]}), LimitError),
        (document({**ROW, "shape": [2**47, 2**47]}), LimitError),
        (document({**ROW, "shape": [2**47], "dtype": "F64"}, {**ROW, "name": "x"}), LimitError),
        (document({**ROW, "shape": [1] * 17}), LimitError),
        (document({**ROW, "name": "x" * 513}), LimitError),
        (document({**ROW, "name": ""}), FormatError),
        (document({**ROW, "name": "@0.ids"}), FormatError),
        (document({**ROW, "name": "__metadata__"}), FormatError),
        (document({**ROW, "name": "a\nb"}), FormatError),
        (document({**ROW, "name": "\u202eabc"}), FormatError),
        (document({**ROW, "dtype": "bf16"}), FormatError),
        (document(ROW, ROW), FormatError),
        (document(ROW, {**ROW, "name": "a"}), FormatError),
        (document(ROW)[:-1], FormatError),
        (document(ROW).replace(b":", b": "), FormatError),
    ],
)
def test_what_is_not_a_table(data: bytes, error: type[DeltaSyncError]) -> None:
    with pytest.raises(error) as caught:
        TensorTable.from_bytes(data)
    assert type(caught.value) is error


def test_names_that_utf8_cannot_spell() -> None:
    with pytest.raises(FormatError, match="not printable"):
        TensorTable([TensorSpec("\ud800", "U8", (1,))])
