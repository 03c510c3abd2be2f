"""The rows of a sweep as docs/models.md."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from tests.tools.models.trial import Outcome, Row

ORDER: tuple[str, ...] = get_args(Outcome)
_HEAD = """# Models

Made by `make models`, which needs no GPU: every architecture that vLLM's registry lists for text generation, and the
language part of the multimodal ones that transformers can build, made small (two layers or one of each kind, hidden
size 128) with random weights.

Of each, a checkpoint is written by transformers and loaded by vLLM's own CPU worker, with the plugin as in a server. A
run over it is published with three versions: two change about 1 % of the elements of every tensor, one changes small
vectors wholly (norms, biases). The receiver follows, goes back one version and forward again. After each step every
tensor that can be reached from the model (parameters, buffers, attributes of modules and of what hangs on them) is
compared with that of a model freshly loaded from a checkpoint of that version.

| outcome | what it means |
|---|---|
| exact | every tensor has the bits of a fresh load, at every step; all tensors are patched in place |
| exact through the fallback | the same; tensors that the loader computes are loaded again by vLLM's own code |
| refused | the server says so at start-up, with the tensor and the reason; nothing is served from a delta |
| not buildable here | it cannot be made small or loaded at all, for the reason given: nothing is known about it |
| WRONG | a bit differs; `make models` fails |

What this does not show: other quantizations, other sizes, kernels and layouts of GPUs, several ranks. A model is proven
anew at every start of a server, on what is really loaded there.
"""


def ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (ORDER.index(row.outcome), row.architecture.lower()))


def counts(rows: Sequence[Row]) -> str:
    """How many there are of each outcome."""
    number = Counter[str](row.outcome for row in rows)
    return f"{len(rows)} architectures: " + ", ".join(f"{number[name]} {name}" for name in ORDER if number[name])


def document(rows: Sequence[Row]) -> str:
    lines = [_HEAD, f"{counts(rows)}.", f"Versions: {_versions()}.", ""]
    tried = [row for row in rows if row.outcome.startswith("exact")]
    if tried:
        lines += [_costs(tried), ""]
    lines += [
        "Tensors are those of the checkpoint, *derived* those of them that go through the fallback, *left out* those",
        "that vLLM's loader does not load (a tied head, a vision tower), *compared* those reached in the model.",
        "",
        "| architecture | outcome | tensors | derived | left out | compared | load ms | trace ms | reason |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
        *(_line(row) for row in rows),
        "",
        "¹ Not in transformers: a config of the usual fields, and a checkpoint in the names that vLLM's loader reads.",
    ]
    return "\n".join(lines) + "\n"


def _versions() -> str:
    import torch
    import transformers

    from vllm_delta_sync.engine.compat import patches

    name, version = patches.distribution_version()
    return f"{name} {version}, transformers {transformers.__version__}, torch {torch.__version__}"


def _costs(rows: Sequence[Row]) -> str:
    load, trace, scan = (
        statistics.median(getattr(row, name) for row in rows) for name in ("load_ms", "trace_ms", "scan_ms")
    )
    return (
        f"Start-up of a model that is exact, medians: tracing and its proofs {trace:.0f} ms and hashing what is held\n"
        f"{scan:.0f} ms, where vLLM takes {load:.0f} ms to build and load the model (the second load in a process,\n"
        "from page cache). Tracing grows with the number of tensors, hashing and loading with their size."
    )


def _line(row: Row) -> str:
    name = row.architecture if row.by_transformers else f"{row.architecture} ¹"
    reason = row.reason.replace("|", "\\|").replace("<", "&lt;")
    if row.outcome == "not buildable here":
        return f"| {name} | {row.outcome} | | | | | | | {reason} |"
    times = f"{row.load_ms:.0f} | {row.trace_ms:.0f}"
    numbers = f"{row.tensors} | {row.derived} | {len(row.unloaded)} | {row.compared}"
    return f"| {name} | {row.outcome} | {numbers} | {times} | {reason} |"
