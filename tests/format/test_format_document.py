"""docs/FORMAT.md says what the code does: names, numbers and keys that it prints are looked up."""

import re
from pathlib import Path

import pytest

from tests.golden.regenerate import DIRECTORY, TREE
from vllm_delta_sync.codec.delta_object import BLOCK_ELEMENTS, KINDS
from vllm_delta_sync.codec.tiles.alphabets import CLASSES, LONGEST, SYMBOLS, TABLES
from vllm_delta_sync.codec.tiles.coder import BLOCK_CHANGES, SMALL_ELEMENTS
from vllm_delta_sync.codec.tiles.grid import (
    LEAST_ELEMENTS,
    NARROW,
    SHARERS,
    SHARERS_OF_ROWS,
    TALL,
    TILE_ELEMENTS,
    VOCABULARY_ROWS,
    grid_of,
)
from vllm_delta_sync.errors import error_kinds
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import Document
from vllm_delta_sync.format.codecs import CODECS, FEATURES
from vllm_delta_sync.format.documents import (
    Anchor,
    Claim,
    Collection,
    Heartbeat,
    MergedDelta,
    Retention,
    Tag,
    anchor_key,
    merged_delta_key,
)
from vllm_delta_sync.format.manifest import Head, Manifest, RunInfo, object_key, version_key
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.run.checks import PLAUSIBLE_RANKS, document_limit, object_limit
from vllm_delta_sync.run.run_reader import MAX_BAD_DOCUMENTS, MAX_BAD_IN_A_ROW

TEXT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()


def section(title: str) -> str:
    """Text from a heading to the next one."""
    found = re.search(rf"^## \d+\. {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found.group(1)


def first_column(text: str) -> set[str]:
    """Names in backticks in the first column of the tables of a section."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def number(text: str) -> int:
    base, _, exponent = text.replace(",", "").partition("^")
    return int(base) ** int(exponent or 1)


def test_limits() -> None:
    printed = re.findall(r"^\| `(MAX_\w+)` \| ([\d,^]+) \|", section("Limits"), re.MULTILINE)
    known = {name: getattr(limits, name) for name in dir(limits) if name.startswith("MAX_")}
    assert {name: number(value) for name, value in printed} == known


def test_largest_object() -> None:
    table = TensorTable([TensorSpec("a", "BF16", (1000,)), TensorSpec("b", "F32", (10,))])
    assert object_limit(table) == 2 * table.full_bytes + 4096 * 2 + 1_048_576


def test_largest_document() -> None:
    table = TensorTable([TensorSpec("a", "BF16", (2**30,)), TensorSpec("é", "F32", (10,))])
    assert document_limit(table) == 1_048_576 + (2 * 1 + 64) + (2 * 2 + 64) + 256 * (2 + 2 + 4096)
    many = TensorTable([TensorSpec(f"{number:06d}", "U8", (1,)) for number in range(70_000)])
    assert document_limit(many) == 1_048_576 + 70_000 * (2 * 6 + 64) + 256 * 65_536
    for part in ("Σ (2 · bytes of the tensor's name + 64)", "256 · objects", f"+ {PLAUSIBLE_RANKS:,})"):
        assert part in section("Limits")
    assert f"more than {MAX_BAD_IN_A_ROW} that follow each other, or more than {MAX_BAD_DOCUMENTS} times" in section(
        "Limits"
    )


def test_dtypes() -> None:
    rows = re.findall(r"^\| (`[A-Z].*?) \| (\d) \| (float|integer) \|", section("tensors.json"), re.MULTILINE)
    printed = {name: (int(width), order) for names, width, order in rows for name in re.findall(r"`(\w+)`", names)}
    assert printed == {
        dtype.name: (dtype.itemsize, "float" if dtype.is_float else "integer") for dtype in DTYPES.values()
    }


def test_members_of_documents() -> None:
    assert first_column(section("run.json")) == set(RunInfo.model_fields)
    assert first_column(section("Manifests")) == set(Manifest.model_fields)
    for name in Head.model_fields:
        assert f"`{name}`" in section("HEAD.json")


BESIDE: list[type[Document]] = [Anchor, MergedDelta, Tag, Claim, Heartbeat, Collection, Retention]


@pytest.mark.parametrize("kind", BESIDE)
def test_members_of_what_lies_beside_the_chain(kind: type[Document]) -> None:
    titles = {Anchor: "Anchors", MergedDelta: "Merged deltas"}
    title = titles.get(kind) or (kind.__name__ if kind is Retention else f"{kind.__name__}s")
    found = re.search(rf"^### {title}\n(.*?)(?=^### |\Z)", section("Beside the chain"), re.MULTILINE | re.DOTALL)
    assert found is not None
    common = {"format_version", "requires", "run", "created_at", "signature"}
    assert first_column(found[1]) | common == set(kind.model_fields)
    assert all(f"`{name}`" in section("Beside the chain") for name in common)


def test_kinds_of_signed_documents() -> None:
    text = section("Signatures")
    others: list[type[Document]] = [Head, Manifest, RunInfo]
    for kind in BESIDE + others:
        assert f"`{kind.KIND}`" in text


def test_features_blocks_and_error_kinds() -> None:
    assert {*CODECS, "zstd"} == FEATURES
    for name in FEATURES:
        assert f"`{name}`" in section("Extensions")
    assert f"{BLOCK_ELEMENTS:,}" in section("Delta objects")
    kinds = section("What a reader verifies, and in what order").rpartition("Errors fall into")[2]
    assert set(re.findall(r"`(\w+)`", kinds)) <= set(error_kinds())


def test_kinds_of_blocks_and_numbers_of_tiles() -> None:
    assert first_column(section("Delta objects")) >= set(KINDS)
    assert f"{BLOCK_CHANGES:,} changed" in section("Delta objects")
    text = " ".join(section("Tiles").split())
    assert f"Let *T* = {TILE_ELEMENTS:,} and *L* = {LEAST_ELEMENTS:,}" in text
    lists = ", ".join("(" + ", ".join(map(str, ranks)) + ")" for ranks in SHARERS)
    rows = ", ".join("(" + ", ".join(map(str, ranks)) + ")" for ranks in SHARERS_OF_ROWS)
    assert f"The lists {lists} are tried in this order, then {rows} without cutting columns" in text
    assert f"multiple of {VOCABULARY_ROWS}" in text
    assert f"{TALL} times more rows than columns" in text
    assert f"fewer than {NARROW} columns" in text
    assert f"fewer than {SMALL_ELEMENTS:,} elements" in text
    assert f"A length is at most {LONGEST}" in text
    assert f"| 0 | {CLASSES} | **keys**" in text
    each, last = f"{2 * SYMBOLS} · *t* | {SYMBOLS} |", SYMBOLS - 1
    assert f"| {CLASSES} + {each} table *t*, 0 to {TABLES - 1}: **code lengths** of the symbols 0 to {last} |" in text
    assert f"| {CLASSES + SYMBOLS} + {each} the same table: code lengths of the tokens 0 to {last} of" in text
    assert f"| {CLASSES + TABLES * 2 * SYMBOLS} + *m* · *j* |" in text


def test_keys() -> None:
    keys = first_column(section("Keys and commit order"))
    assert version_key(7) == "versions/0000000007.json"
    assert object_key("<sha256>") in keys
    found = {path.relative_to(DIRECTORY).parts[0] for path in DIRECTORY.rglob("*")}
    assert found == {"run.json", "tensors.json", "HEAD.json", "versions", "objects"}
    beside = {path.relative_to(TREE).parts[0] for path in TREE.rglob("*")} - found
    not_in_tree = {"versions", "objects", "files", "sidecars", "collections"}
    assert beside == {key.split("/")[0] for key in keys if "/" in key or key == "retention.json"} - not_in_tree
    assert [anchor_key(5), merged_delta_key(0, 4)] == ["anchors/0000000005.json", "merged/0000000000-0000000004.json"]


def test_the_grids_of_the_examples() -> None:
    """A list of edges that is cut short has its first ones, and after the dots its last ones."""
    rows = re.findall(r"^\| \[([\d, ]+)\] \| (\d+) \| (.+) \| (.+) \|$", section("Tiles"), re.MULTILINE)
    assert len(rows) >= 10
    for shape, tiles, *edges in rows:
        grid = grid_of(tuple(map(int, shape.split(", "))))
        assert grid.tiles == int(tiles), shape
        for text, found in zip(edges, (grid.column_edges, grid.row_edges), strict=True):
            before, dots, after = text.partition("…")
            first, last = (
                [int(edge) for edge in re.findall(r"\d+", part.rpartition(":")[2])] for part in (before, after)
            )
            whole = found.tolist()
            assert whole[: len(first)] == first, (shape, text)
            assert whole[len(whole) - len(last) :] == last, (shape, text)
            assert dots or whole == first, (shape, text)
