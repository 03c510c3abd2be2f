"""Change the core in small ways and see whether its tests notice: ``python -m tests.tools.mutants [--write FILE]``.

A mutant is the product with one change: a comparison turned, a number one larger, a condition negated, a check or a
call left out. The sample is drawn at random from all mutants of ``CORE``, with a fixed seed, so that two states of the
tests are measured by the same mutants as long as the product is the same. Each is tried in a copy of the tree, by the
suites of its module, until the first test fails. A mutant that no test notices is equivalent to the original, or shows
a hole in the tests.
"""

import argparse
import ast
import concurrent.futures
import copy
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261124
MUTANTS = 200
SPARE_SECONDS = 60.0
COMPILE_SECONDS = 600.0
"""Longest time to compile all loops anew, on a busy machine."""

_CORE = """\
vllm_delta_sync/codec/delta_object.py: codec/test_delta codec/test_delta_hostile
vllm_delta_sync/codec/delta_writer.py: codec/test_delta format/test_golden
vllm_delta_sync/codec/delta_reader.py: codec/test_delta codec/test_delta_hostile codec/test_lazy format/test_golden
vllm_delta_sync/codec/full.py: codec/test_full codec/test_delta codec/test_delta_hostile
vllm_delta_sync/codec/tiles/coder.py: codec/test_tiles codec/test_tiles_hostile codec/test_tile_parts format/test_golden
    codec/test_prefix_code
vllm_delta_sync/codec/tiles/grid.py: codec/test_tile_grid codec/test_tile_parts
vllm_delta_sync/codec/tiles/shared_kernels.py: codec/test_prefix_code codec/test_tiles format/test_golden
vllm_delta_sync/codec/tiles/encode_kernels.py: codec/test_tiles codec/test_tile_parts
vllm_delta_sync/codec/tiles/decode_kernels.py: codec/test_tiles codec/test_tiles_hostile codec/test_tile_parts
vllm_delta_sync/codec/merge.py: codec/test_merge codec/test_lazy run/test_compaction
vllm_delta_sync/format/manifest.py: format/test_manifest format/test_golden security/test_documents
vllm_delta_sync/run/read_plan.py: run/test_plan receiver/test_planning
vllm_delta_sync/run/restore.py: run/test_restore run/test_history
vllm_delta_sync/verify/verify.py: run/test_verify run/test_history trust/test_verify_signed
vllm_delta_sync/run/ancestors.py: trust/test_trust_keys trust/test_receiver_attacks
trainer_side/committer.py: trainer/test_publisher trainer/faults/test_store_faults trainer/test_gate trainer/test_rebase
    trainer/test_baseline_rescan trainer/test_baseline_disk trainer/test_budgets trainer/test_end_of_training
    trainer/test_fencing
trainer_side/writer.py: trainer/test_publisher trainer/faults/test_store_faults trainer/test_fencing
    trainer/test_single_writer trust/test_signed_publisher
trainer_side/run_start.py: trainer/test_publisher trainer/test_single_writer
trainer_side/takeover.py: trainer/test_fencing trainer/test_single_writer trainer/test_resume
    trust/test_signed_publisher
vllm_delta_sync/engine/commit/apply.py: receiver/test_commit receiver/test_foreign_writers receiver/test_follow
    receiver/test_rollback receiver/test_commit_faults
vllm_delta_sync/engine/commit/transaction.py: receiver/test_follow receiver/test_commit_faults
vllm_delta_sync/engine/model/device_batch.py: receiver/test_device_commit receiver/test_commit
vllm_delta_sync/engine/model/device_patch.py: receiver/test_device_commit receiver/test_commit
    receiver/test_commit_faults
vllm_delta_sync/engine/model/patch.py: receiver/test_patch_routing receiver/test_commit receiver/test_tiled_codec
vllm_delta_sync/engine/model/route_map.py: receiver/test_follow receiver/test_commit_faults receiver/test_ownership
vllm_delta_sync/engine/compat/caches.py: receiver/test_caches
vllm_delta_sync/engine/core/pause_watchdog.py: receiver/test_pause_watchdog receiver/test_compat
vllm_delta_sync/engine/core/executors.py: receiver/test_rank_calls
"""
CORE = {
    module: [f"{suite}.py" for suite in suites.split()]
    for module, suites in re.findall(r"^(\S+):((?:\s+\S+/test_\w+)+)", _CORE, re.MULTILINE)
}
"""Modules of the core, and the suites in tests/ that answer for each."""

TURNED: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
LOG_CALLS = ("debug", "info", "warning", "error", "exception")


@dataclass(frozen=True)
class Mutant:
    """One change of one module: bytes ``start`` to ``end`` become ``new``."""

    module: str
    line: int
    start: int
    end: int
    old: str
    new: str


@dataclass(frozen=True)
class Outcome:
    """What the suites made of a mutant: ``killed``, ``survived`` or ``hung``; the last counts as noticed."""

    mutant: Mutant
    verdict: str
    seconds: float


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that a node can be replaced by in a mutant."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        turned = copy.deepcopy(node)
        turned.ops = [TURNED[type(node.ops[0])]()]  # type: ignore[list-item]
        yield turned
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in TURNED:
        other = copy.deepcopy(node)
        other.op = TURNED[type(node.op)]()  # type: ignore[assignment]
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()


def _looked_at(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all under it, but for what no test should pin: annotations and log lines."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                called = child.value.func
                if isinstance(called, ast.Attribute) and called.attr in LOG_CALLS:
                    continue
            if isinstance(child, ast.AST):
                yield from _looked_at(child)


def mutants_of(module: str, source: bytes) -> list[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _looked_at(ast.parse(source)):
        tests = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else None
        made = [(node, new) for new in changes(node)]
        if tests is not None:
            made.append((tests, ast.UnaryOp(ast.Not(), tests)))
        for old, new in made:
            if not isinstance(old, ast.expr | ast.stmt) or old.end_lineno is None or old.end_col_offset is None:
                continue
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            text = ast.unparse(new)
            text = f"({text})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant) else text
            candidate = Mutant(module, old.lineno, start, end, source[start:end].decode(), text)
            try:
                compile(changed(source, candidate), module, "exec")
            except SyntaxError:
                # Such as a number within an f-string: its place is not its own.
                continue
            found.append(candidate)
    return found


def changed(source: bytes, mutant: Mutant) -> bytes:
    """The module as the mutant has it."""
    return source[: mutant.start] + mutant.new.encode() + source[mutant.end :]


def drawn(count: int, seed: int) -> list[Mutant]:
    """A sample over the core: as many per module as it has of all that can be made, and at least one."""
    every = {module: mutants_of(module, (ROOT / module).read_bytes()) for module in CORE}
    total = sum(map(len, every.values()))
    chance = random.Random(seed)
    sample: list[Mutant] = []
    for found in every.values():
        sample += chance.sample(found, min(len(found), max(1, round(count * len(found) / total))))
    return sample


class Tree:
    """A copy of the tracked files, in which one mutant at a time is tried.

    Attributes:
        printed: what the last run printed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.printed = folder, folder.with_suffix(".txt")
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, suites: Sequence[str], seconds: float, compiled: Path | None = None) -> str:
        """``survived`` if all tests pass, ``killed`` if one fails, ``hung`` if they take longer than that.

        Args:
            compiled: where numba keeps what it compiles; None: beside the modules.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not e2e"]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        if compiled is not None:
            environment["NUMBA_CACHE_DIR"] = str(compiled)
        with self.printed.open("w") as printed:
            process = subprocess.Popen(
                [*command, *suites],
                cwd=self.folder,
                env=environment,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return "survived" if process.wait(seconds) == 0 else "killed"
        except subprocess.TimeoutExpired:
            return "hung"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()

    def attempt(self, mutant: Mutant, suites: Sequence[str], seconds: float) -> Outcome:
        """Try one mutant; the module is as it was afterwards."""
        path, began = self.folder / mutant.module, time.monotonic()
        original = path.read_bytes()
        try:
            path.write_bytes(changed(original, mutant))
            # numba looks for changes of a loop's own module alone: loops of others would still call the original.
            if path.name.endswith("kernels.py"):
                with tempfile.TemporaryDirectory(prefix="mutants-") as compiled:
                    verdict = self.run(suites, seconds + COMPILE_SECONDS, Path(compiled))
            else:
                verdict = self.run(suites, seconds)
            return Outcome(mutant, verdict, time.monotonic() - began)
        finally:
            path.write_bytes(original)


def measured(sample: Sequence[Mutant], suites: Mapping[str, Sequence[str]], workers: int) -> list[Outcome]:
    """Try mutants, some at a time."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as made:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(workers):
            trees.put(Tree(Path(made, str(number))))
        modules = sorted({mutant.module for mutant in sample})
        limits: dict[str, float] = {}

        def unchanged(module: str) -> float:
            tree, began = trees.get(), time.monotonic()
            try:
                if (verdict := tree.run(suites[module], 1800)) != "survived":
                    end = tree.printed.read_text(errors="replace")[-6000:]
                    raise SystemExit(f"mutants: the suites of {module} are {verdict} without any change:\n{end}")
                return 4 * (time.monotonic() - began) + SPARE_SECONDS
            finally:
                trees.put(tree)

        def attempt(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                return tree.attempt(mutant, suites[mutant.module], limits[mutant.module])
            finally:
                trees.put(tree)

        with (
            concurrent.futures.ThreadPoolExecutor(workers) as pool,
            tqdm(total=len(modules) + len(sample), unit="run", disable=None) as bar,
        ):
            for module, limit in zip(modules, pool.map(unchanged, modules), strict=True):
                limits[module] = limit
                bar.update()
            outcomes = []
            try:
                for outcome in pool.map(attempt, sample):
                    outcomes.append(outcome)
                    bar.update()
                    where = f"{outcome.mutant.module}:{outcome.mutant.line}"
                    bar.write(f"{outcome.verdict} in {outcome.seconds:.0f} s: {where}", sys.stderr)
            except KeyboardInterrupt:
                # What was tried in an hour is reported; what was not is not counted.
                pool.shutdown(wait=False, cancel_futures=True)
            return outcomes


def report(outcomes: Sequence[Outcome]) -> str:
    """How many were noticed, by module, and those that were not."""
    if not outcomes:
        return "no mutant was tried\n"
    lines = ["| module | mutants | noticed |", "|---|---|---|"]
    for module in CORE:
        own = [outcome for outcome in outcomes if outcome.mutant.module == module]
        if own:
            lines.append(f"| `{module}` | {len(own)} | {sum(outcome.verdict != 'survived' for outcome in own)} |")
    noticed = sum(outcome.verdict != "survived" for outcome in outcomes)
    lines.append(f"| all | {len(outcomes)} | {noticed} ({100 * noticed / len(outcomes):.1f} %) |")
    lines += ["", "Not noticed:", ""]
    for outcome in outcomes:
        if outcome.verdict == "survived":
            mutant = outcome.mutant
            old = " ".join(mutant.old.split())
            lines.append(f"- `{mutant.module}:{mutant.line}`: `{old[:100]}` → `{' '.join(mutant.new.split())[:100]}`")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.mutants",
        description="Change the core in small ways, one at a time, and see whether its tests notice.",
    )
    parser.add_argument("--count", type=int, default=MUTANTS, metavar="N", help=f"mutants to draw (default: {MUTANTS})")
    parser.add_argument("--seed", type=int, default=SEED, help="another sample")
    parser.add_argument("--only", metavar="MODULE", help="mutants of this module alone, such as engine/commit.py")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="what was noticed in this file counts; only the others are tried"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="at a time (default: one per core)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="each outcome as JSON")
    options = parser.parse_args(arguments)
    suites = {module: [f"tests/{suite}" for suite in found] for module, found in CORE.items()}
    sample = [
        mutant for mutant in drawn(options.count, options.seed) if not options.only or options.only in mutant.module
    ]
    if not sample:
        parser.error(f"--only {options.only!r} names no module of the core")
    noticed: dict[Mutant, Outcome] = {}
    if options.again:
        for row in json.loads(options.again.read_text()):
            mutant = Mutant(**row["mutant"])
            if row["verdict"] != "survived" and mutant in sample:
                noticed[mutant] = Outcome(mutant, row["verdict"], row["seconds"])
    tried = measured([mutant for mutant in sample if mutant not in noticed], suites, options.workers)
    outcomes = [*noticed.values(), *tried]
    if options.write:
        options.write.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    print(report(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
