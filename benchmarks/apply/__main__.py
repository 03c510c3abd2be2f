"""The commit of a staged version on real vLLM models, against every other way to get the same bits there.

Dense (Qwen3, 0.51 B parameters) and experts (Qwen3-MoE, 8 layers of 64, 0.33 B) in bfloat16 on the CPU, weights in the
plain layout that our worker extension keeps: on vLLM's own CPU layout the peers fail, or corrupt experts silently. One
thread. A method counts only if every parameter is bit-equal to a fresh load of the new checkpoint. All methods start
from the same restored weights, in turns; times are the shortest of several runs.

Peers, and the direction of their ``ratio``:

- ``load_checkpoint_weight_patches`` (vLLM's sparse patcher; also with its check for duplicates switched off),
  ``load_weights`` (the whole new checkpoint, in memory) and ``load from file`` (the same through vLLM's safetensors
  iterator, page cache warm): peer time / ours, so *higher is better*.
- ``bare_scatter``: one compiled loop per parameter that writes precomputed bits at our positions, in our order, int32
  as ours, and does nothing else; ``bare_scatter into one array`` writes them to one flat array of the model's size,
  ``bare_scatter, prefetching`` asks for cache lines ahead, as our loop does: without that even ours can be faster than
  a bare scatter. Ours / peer time, so *lower is better*.

``proof`` and ``rescan`` hash all weights where they lie in the model, as a server does at its start and on
``POST /delta_sync/verify``; ``trace`` finds out where that is. Rows ``TP 1`` are of the whole model; rows of
row-parallel slices are what ``o_proj`` and ``down_proj`` have on one of two tensor parallel ranks, a part of every row.
The peer is one compiled loop that reads the same bytes as 64-bit words and combines them by XOR: ours / peer time, so
*lower is better*.

``extra memory`` is the peak of resident memory above ``input``, what the method is handed (for ours: decoded changes;
staging is included, and the staged patch is the undo log too). Mapped pages of the file count as memory.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.apply.models import pinned_environment
from benchmarks.common import real_model, real_steps
from benchmarks.common.rows import Row, parser, start
from benchmarks.common.tables import Place, grid, pivot

BENCH = "apply"
NO_MEMORY = ("stage", "take back", "load_weights", "load from file", "bare_scatter")
"""What takes no memory beside what it is given, or that of the commit; or, from a file, that of the whole file."""
LEFT_OUT = (
    *("take back", "load from file", "bare_scatter, prefetching", "bare_scatter into one array"),
    "load_checkpoint_weight_patches, duplicates unchecked",
)
"""Rows of the results that the page leaves out, which has to stay short."""


def tables(rows: Sequence[Row]) -> list[str]:
    """Times, memory, and proof where it was measured."""
    kinds = {"ms": "", "MB": ": extra memory"}

    def place(unit: str) -> Callable[[Row], Place]:
        def of(item: Row) -> Place:
            known = item["unit"] == unit and item["metric"].endswith(kinds[unit]) and "TP" not in item["case"]
            if unit == "MB" and item["metric"].startswith(NO_MEMORY):
                return None
            line = item["metric"].removesuffix(kinds[unit])
            return (line, item["case"]) if known and line not in LEFT_OUT else None

        return of

    proof = [item for item in rows if "TP" in item["case"]]
    lines = [*pivot("ms, of changed weights", rows, place("ms")), "", *pivot("extra memory, MB", rows, place("MB"))]
    return (
        [*lines, "", *grid("ms", proof, ("trace", "proof", "rescan", "one read of the same bytes"))] if proof else lines
    )


def main(arguments: list[str] | None = None) -> None:
    known = parser(BENCH, __doc__ or "", minutes=6)
    real_model.add_flag(known)
    options = start(known, arguments)
    flags = [f"--{name}" for name in ("quick", "real") if getattr(options, name)]
    checkpoint = real_model.find_checkpoint(options)
    if checkpoint is not None:
        flags += ["--checkpoint", str(checkpoint)]
        real_steps.pairs("settled", rates=(real_steps.SEQUENCE_RATE,))  # cached here, where training has all cores
    # Thread counts are read when libraries load, and vLLM's state stays in its process for good.
    command = [sys.executable, "-m", "benchmarks.apply.measure", "--json", str(options.json.absolute())]
    done = subprocess.run(
        [*command, *flags],
        cwd=Path(__file__).parents[2],
        env=pinned_environment(),
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
