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


WRONG: dict[type[DeltaSyncError], list[bytes]] = {
    UnsupportedError: [document(format_version=3)],
    LimitError: [
        *(document({**ROW, "shape": shape}) for shape in ([-1], [2**48 + 1], [2**47, 2**47], [1] * 17)),
        document({**ROW, "shape": [2**47], "dtype": "F64"}, {**ROW, "name": "x"}),
        document({**ROW, "name": "x" * 513}),
    ],
    FormatError: [
        document(format_version=True), document(tensors={}), rfc8785.dumps([]), rfc8785.dumps({"format_version": 2}),
        document("w"), document({"name": "w", "dtype": "BF16"}), document({**ROW, "dtype": "bf16"}),
        *(document({**ROW, "shape": shape}) for shape in ("2", [2.5], [True])),
        *(document({**ROW, "name": name}) for name in (1, "", "@0.ids", "__metadata__", "a\nb", "\u202eabc")),
        document(ROW, ROW), document(ROW, {**ROW, "name": "a"}), document(ROW)[:-1],
        document(ROW).replace(b":", b": "),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("error", "data"), [(error, data) for error, every in WRONG.items() for data in every])
def test_what_is_not_a_table(error: type[DeltaSyncError], data: bytes) -> None:
    with pytest.raises(error) as caught:
        TensorTable.from_bytes(data)
    assert type(caught.value) is error


def test_names_that_utf8_cannot_spell() -> None:
    with pytest.raises(FormatError, match="not printable"):
        TensorTable([TensorSpec("\ud800", "U8", (1,))])
