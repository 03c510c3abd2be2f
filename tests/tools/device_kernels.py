"""Compile every kernel for GPUs, without one: ``python -m tests.tools.device_kernels [--write]``.

Ends with status 1 if a kernel takes more registers or stack than docs/kernels.md says; ``--write`` renews the document.
Needs Triton: run with PYTHONPATH=.venv/triton:. in the environment that make has made.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.compiler import ASTSource  # type: ignore[import-untyped, import-not-found, unused-ignore]

from trainer_side.diff import compare_triton as compare
from trainer_side.diff.device_memory import BLOCK as COMPARED
from trainer_side.diff.device_memory import COLUMNS
from vllm_delta_sync.engine.model import commit_triton as commit
from vllm_delta_sync.engine.model import decode_triton as decode
from vllm_delta_sync.engine.model import fingerprint_triton as fingerprint
from vllm_delta_sync.engine.model.device_batch import BLOCK
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS


@dataclass(frozen=True)
class DeviceKernel:
    """A kernel as it is compiled for arguments of some types.

    Attributes:
        signature: the type of each parameter but constants, in Triton's words. warps: of a program.
    """

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    warps: int = 4


def _fingerprint(width: int, dims: int) -> DeviceKernel:
    typed = {each.name: each.annotation_type for each in fingerprint.add_hashes.params if each.annotation_type}
    constants = {"DIMS": dims, "SIZE": fingerprint.BLOCK, "BLOCKS": fingerprint.BLOCKS_PER_PROGRAM}
    return DeviceKernel(
        f"fingerprint, int{8 * width}, {dims}-D",
        fingerprint.add_hashes,
        {"flat": f"*i{8 * width}", "sums": "*i64", **typed},
        constants,
    )


def _compare(live: int, base: int) -> DeviceKernel:
    rounds, element = live != base, f"*i{8 * base}"
    return DeviceKernel(
        f"compare, int{8 * base}" + (", rounded from float32" if rounds else ""),
        compare.compare_kernel,
        {
            "table": "*i64", "owners": "*i32", "firsts": "*i32", "counts": "*i32", "counters": "*i64", "slot": "i32",
            "first": "i32", "where": "*i32", "old": element, "new": element, "room": "i32", "nan": "i32",
        },
        {
            "ROUND": rounds, "ALIGNED": True, "LIVE": compare.SIGNED[live], "BASE": compare.SIGNED[base],
            "COLUMNS": COLUMNS, "SIZE": COMPARED,
        },
        warps=compare.COMPARE_WARPS,
    )  # fmt: skip


def _order(width: int) -> DeviceKernel:
    element = f"*i{8 * width}"
    return DeviceKernel(
        f"order, int{8 * width}",
        compare.order_kernel,
        {
            "table": "*i64", "owners": "*i32", "firsts": "*i32", "starts": "*i32", "first": "i32", "blocks": "i32",
            "where": "*i32", "old": element, "new": element, "to_where": "*i32", "to_old": element, "to_new": element,
            "relative": "*i16", "distances": element, "sums": "*i64",
        },
        {
            "FLOAT": True, "CHUNK": CHUNK_ELEMENTS, "COLUMNS": COLUMNS, "SIZE": compare.ORDER_BLOCK,
            "BLOCKS": compare.ORDER_BLOCKS,
        },
        warps=1,
    )  # fmt: skip


def _put(width: int) -> DeviceKernel:
    return DeviceKernel(
        f"put, int{8 * width}",
        compare.put_kernel,
        {
            "table": "*i64", "owners": "*i32", "starts": "*i32", "first": "i32", "where": "*i32",
            "bits": f"*i{8 * width}",
        },
        {"BASE": compare.SIGNED[width], "COLUMNS": COLUMNS, "SIZE": compare.ORDER_BLOCK},
        warps=1,
    )  # fmt: skip


def _commit(width: int, relative: bool, dims: int = 1, wide: bool = False) -> DeviceKernel:
    signed, unsigned = commit.WIDTHS[getattr(torch, f"int{8 * width}")]
    return DeviceKernel(
        f"commit, int{8 * width}, {'distances' if relative else 'exchange'}, {dims}-D"
        + (", int64 positions" if wide else ""),
        commit.commit_kernel,
        {
            "table": "*i64", "firsts": "*i32", "segments": "*i32", "positions": "*i64" if wide else "*i32",
            "data": f"*i{8 * width}", "sums": "*i64",
        },
        {
            "REVERSE": False, "RELATIVE": relative, "FLOAT": True, "SIGNED": signed, "UNSIGNED": unsigned,
            "DIMS": dims, "SIZE": BLOCK,
        },
    )  # fmt: skip


def _masks(width: int) -> DeviceKernel:
    signed, _ = commit.WIDTHS[getattr(torch, f"int{8 * width}")]
    return DeviceKernel(
        f"decode: masks, int{8 * width}",
        decode.mask_kernel,
        {
            "fields": "*i32",
            "count": "i32",
            "parts": "*i64",
            "limits": "*i32",
            "masks": "*i32",
            "before": "*i32",
            "members": "*i32",
        },
        {"MAGNITUDE": (1 << (8 * width - 1)) - 1, "ELEMENT": signed, "SIZE": decode.MASK_WORDS},
    )


def _streams(width: int) -> DeviceKernel:
    return DeviceKernel(
        f"decode: streams, int{8 * width}",
        decode.stream_kernel,
        {
            "fields": "*i32", "count": "i32", "parts": "*i64", "streams": "*i64", "tables": "*i16", "members": "*i32",
            "ranks": "*i32", "steps": f"*i{8 * width}", "found": "*i32",
        },
        {"LANES": decode.LANES},
        warps=1,
    )  # fmt: skip


def _places(width: int, wide: bool) -> DeviceKernel:
    return DeviceKernel(
        f"decode: places, int{8 * width}" + (", int64 positions" if wide else ""),
        decode.place_kernel,
        {
            "fields": "*i32", "count": "i32", "parts": "*i64", "masks": "*i32", "before": "*i32", "members": "*i32",
            "ranks": "*i32", "steps": f"*i{8 * width}", "found": "*i32", "ends": "*i64", "room": "i64",
            "positions": "*i64" if wide else "*i32", "distances": f"*i{8 * width}",
        },
        {"SIZE": decode.CHANGES},
    )  # fmt: skip


KERNELS = [
    *(_commit(width, relative) for width in (1, 2, 4, 8) for relative in (True, False)),
    _commit(2, True, dims=2),
    _commit(2, True, dims=3),
    _commit(2, True, dims=2, wide=True),
    _compare(2, 2),
    _compare(4, 2),
    _compare(1, 1),
    _compare(8, 8),
    _order(2),
    _order(8),
    _put(2),
    _fingerprint(1, 1),
    _fingerprint(2, 1),
    _fingerprint(2, 2),
    _fingerprint(2, 4),
    _fingerprint(4, 1),
    _fingerprint(8, 4),
    *(kernel(width) for kernel in (_masks, _streams) for width in (1, 2, 4)),
    _places(2, wide=False),
    _places(2, wide=True),
]
"""To add a kernel, add it here, and a program that runs it under Triton's interpreter to
tests/receiver/test_device_kernels.py."""

CAPABILITIES = (80, 90, 100)
DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
HEADER = """\
# Kernels for GPUs

Made by `python -m tests.tools.device_kernels --write`, which needs no GPU: registers + bytes of stack of a thread, for
three generations of GPUs. Registers spill to the stack. A test ([guarantees](guarantees.md)) fails if a kernel takes
more. It also runs every kernel under Triton's interpreter and compares the results with those of a CPU.
[gpu.md](gpu.md) has a run on a GPU.

"""

Figures = tuple[int, int]
Table = dict[str, list[Figures]]


def compiled(kernel: DeviceKernel, capability: int) -> Figures:
    """Return the registers and the bytes of stack of each thread."""
    signature = {**kernel.signature, **dict.fromkeys(kernel.constexprs, "constexpr")}
    source = ASTSource(fn=kernel.fn, signature=signature, constexprs=kernel.constexprs)
    target = GPUTarget("cuda", capability, 32)
    code = triton.compile(source, target=target, options={"num_warps": kernel.warps}).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    return int(registers), int(stack) + int(local)


def read_table() -> Table:
    rows = re.findall(r"^\| (.+?) \| (\d.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: [_figures(cell) for cell in cells.split(" | ")] for name, cells in rows}


def _figures(cell: str) -> Figures:
    registers, _, stack = cell.partition(" + ")
    return int(registers), int(stack)


def write_table(table: Table) -> None:
    lines = ["| kernel | " + " | ".join(f"sm_{capability}" for capability in CAPABILITIES) + " |"]
    lines += ["|---" * (1 + len(CAPABILITIES)) + "|"]
    for name, row in table.items():
        lines.append(f"| {name} | " + " | ".join(f"{registers} + {stack}" for registers, stack in row) + " |")
    DOCUMENT.write_text(HEADER + "\n".join(lines) + "\n")


def differences(found: Table, known: Table) -> list[str]:
    """Return what is worse than the document says, and what it does not say or says in vain."""
    messages = [f"docs/kernels.md has {name!r}, which is no kernel" for name in known.keys() - found.keys()]
    for name, row in found.items():
        if name not in known:
            messages.append(f"docs/kernels.md does not have {name!r}")
            continue
        for capability, now, before in zip(CAPABILITIES, row, known[name], strict=True):
            if now[0] > before[0] or now[1] > before[1]:
                messages.append(
                    f"{name}, sm_{capability}: {now[0]} registers and {now[1]} bytes of stack, {before[0]} and "
                    f"{before[1]} in docs/kernels.md"
                )
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/kernels.md instead of comparing with it")
    arguments = parser.parse_args()
    found = {kernel.name: [compiled(kernel, capability) for capability in CAPABILITIES] for kernel in KERNELS}
    if arguments.write:
        write_table(found)
        return 0
    messages = differences(found, read_table())
    if messages:
        print(*messages, "python -m tests.tools.device_kernels --write renews it", sep="\n")
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main())
