"""``Report`` makes one check after the other, keeps what came of each, and writes the page about them."""

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INTRODUCTION = """\
# On a GPU

Made by `make test-gpu`, which overwrites this page, on the machine below. Weights are compared bit for bit, tokens and
log-probs exactly. Times are medians; GB/s counts what has to be read and written at least.

It needs a Linux machine with an NVIDIA GPU of 24 GB or more, 40 GB of memory, 20 GB of temporary disk space, and a
Python on `PATH` (or `PYTHON=…`) that has a CUDA build of torch, with Triton, and vLLM. It installs what else is missing
into `.venv-gpu`. Plan an hour; `make test-gpu GPU_FLAGS=--quick` uses small shapes and fewer versions. Modules have
Llama-8B's shapes, 8 layers of 32. Their checks need torch and Triton only, and without vLLM those of real
servers are left out: versions from AdamW steps beside a fresh server, with CUDA graphs and torch.compile, on one GPU
and tensor parallel on two; pauses under load; sleep during staging; staging without device memory; `LLM` objects with
experts, adapters, sleep at both levels, and fp8. `--only engines`, `servers` or `modules` makes a part of the checks.
"""
FIGURES_LENGTH = 300


class LeftOutError(Exception):
    """A check cannot be made here; the message says why."""


@dataclass
class Report:
    """What came of checks: (name, ``passed``, ``FAILED`` or ``left out``, figures), in order.

    Attributes:
        machine: what they run on. page: written anew after each check, so that what ends the program loses none.
    """

    machine: Mapping[str, str] = field(default_factory=dict)
    page: Path | None = None
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return any(outcome == "FAILED" for _, outcome, _ in self.rows)

    def check(self, name: str, action: Callable[[], str]) -> bool:
        """Make a check and print its progress; returns whether it passed.

        Args:
            action: returns figures. An error means that the check failed, LeftOutError that it was left out.
        """
        self._print(f"{name} …")
        try:
            outcome, figures = "passed", action()
        except LeftOutError as error:
            outcome, figures = "left out", str(error)
        except Exception as error:  # noqa: BLE001  whatever fails, the other checks are made, and the table says so
            traceback.print_exc()
            outcome, figures = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0][:FIGURES_LENGTH]
        self.rows.append((name, outcome, figures))
        if self.page is not None:
            self.page.write_text(self.document())
        self._print(f"{name}: {outcome}. {figures}")
        return outcome == "passed"

    def table(self) -> str:
        cells = [("check", "outcome", "figures"), ("---",) * 3, *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in cells) + "\n"

    def document(self) -> str:
        """The page docs/gpu.md."""
        lines = [f"| {name} | {value} |" for name, value in self.machine.items()]
        return "\n".join([INTRODUCTION, "| | |", "|---|---|", *lines, "", self.table()])

    def _print(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f} s] {line}", file=sys.stderr, flush=True)
