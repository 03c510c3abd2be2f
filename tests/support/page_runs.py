"""Runs and statuses for the page: a busy one, 10,000 versions, an empty one, a broken one, one with hostile names."""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.samples import RUN, RunWriter, random_bits
from vllm_delta_sync import __version__
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.fleet.heartbeats import write_heartbeat
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.manifest import Manifest, object_key, version_key
from vllm_delta_sync.format.table import TensorSpec, TensorTable

PARTS = (
    *("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    *("self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down_proj.weight",
)
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "';document.title='owned';//",
    "\u202egnp.exe<svg/onload=document.title='owned'>",
    "{{constructor.constructor('document.title=1')()}}" + "long" * 60,
)
"""Names and texts that are not to become markup."""


def layered_table(layers: int, width: int = 48, names: Callable[[str], str] = str) -> TensorTable:
    """A model of that many layers, as those of today's language models are named."""
    found = [("model.embed_tokens.weight", (4 * width, width)), ("model.norm.weight", (width,))]
    for layer in range(layers):
        for part in PARTS:
            shape = (width,) if "norm" in part else (width, width)
            found.append((f"model.layers.{layer}.{part}", shape))
    return TensorTable([TensorSpec(names(name), "BF16", shape) for name, shape in found])


class PageRun:
    """A run that was published over the last hours.

    Args:
        every: seconds between versions.
    """

    def __init__(self, folder: Path, table: TensorTable, versions: int, every: float = 45.0) -> None:
        self.folder = folder
        self.random = np.random.default_rng(7)
        self.every = every
        self.began = time.time() - versions * every - 20
        self.writer = RunWriter(open_bucket(str(folder)), table, RUN)
        self._tick(0)
        self.writer.anchor(random_bits(table, self.random))

    @property
    def head(self) -> int:
        return len(self.writer.manifests) - 1

    def _tick(self, version: int) -> None:
        moment = self.began + (version + 0.3 * math.sin(version)) * self.every
        self.writer.created_at = timestamp(datetime.fromtimestamp(moment, UTC))

    def delta(self, share: Callable[[str], float], reasons: list[str] | None = None) -> Manifest:
        """A version that changes a share of each tensor, by its name; ``reasons`` quarantine it."""
        self._tick(self.head + 1)
        new = []
        for spec, bits in zip(self.writer.table, self.writer.bits[-1], strict=True):
            moved, chosen = bits.copy(), self.random.random(bits.size) < share(spec.name)
            moved[chosen] += self.random.integers(1, 3, int(chosen.sum())).astype(bits.dtype)
            new.append(moved)
        quarantine = None if reasons is None else {"reasons": reasons, "sound": self.writer.manifests[-1].sound}
        self.writer.bits[:-1] = [[]] * (len(self.writer.bits) - 1)  # only the newest are needed
        return self.writer.delta(new, quarantine=quarantine)

    def busy(self, versions: int) -> None:
        """Deltas whose share sinks as training settles; the middle layers change most. One of them is quarantined."""
        layers = max(1, sum("q_proj" in spec.name for spec in self.writer.table))
        for version in range(1, versions + 1):
            settled = 0.02 + 0.10 * math.exp(-version / 60) + 0.015 * math.sin(version / 5)

            def share(name: str, settled: float = settled) -> float:
                layer = next((int(part) for part in name.split(".") if part.isdecimal()), layers // 3)
                bump = math.exp(-(((layer - 0.62 * layers) / (0.3 * layers)) ** 2))
                kind = 0.05 if "norm" in name else 1.6 if "mlp" in name else 0.7
                return float(min(1.0, settled * (0.12 + bump) * kind))

            reasons = ["the update's norm is 11.4 times the median of the last 50 versions"]
            self.delta(share, reasons if version == round(0.71 * versions) else None)

    def many(self, versions: int) -> None:
        """Manifests alone, up to ``versions``: garbage collection has removed their objects."""
        before = self.writer.manifests[-1]
        puts = []
        for version in range(self.head + 1, versions):
            self._tick(version)
            size = round(9000 + 4000 * math.sin(version / 300) + 12000 * math.exp(-version / 900))
            digest = sha256(f"{version}".encode()).hexdigest()
            ref = {"key": object_key(digest), "bytes": size, "sha256": digest}
            fields: dict[str, Any] = {"base_version": version - 1, "parent": before.digest, "objects": [ref]}
            fields |= {"run": RUN, "version": version, "step": 4 * version, "kind": "delta", "payload_bytes": size}
            fields |= {
                "changed": round(before.total * size / 4e5),
                "total": before.total,
                "full_bytes": before.full_bytes,
            }
            fields |= {"fingerprint": before.fingerprint, "codec": "plain", "created_at": self.writer.created_at}
            before = Manifest.model_validate(fields)
            puts.append((version_key(version), before.to_bytes()))
            self.writer.manifests.append(before)
        for key, data in puts:
            self.writer.bucket.put(key, data)
        self.writer.bits += [self.writer.bits[-1]] * (versions - len(self.writer.bits))
        self.writer.head(self.head)

    def receiver(self, name: str, served: int | None, **more: Any) -> None:
        fields: dict[str, Any] = {"state": "idle", "following": "head", "head": self.head, "seconds": 120, **more}
        with open_run(str(self.folder)) as run:
            write_heartbeat(run, name, served, **fields)

    def status(self, served: int, receiver: str, **more: Any) -> dict[str, Any]:
        """A status as a server gives it, with commits up to the version served."""
        recent = []
        for version in range(max(1, served - 47), served + 1):
            manifest = self.writer.manifests[version]
            noise = self.random.random(7)
            timings: dict[str, float] = dict(
                zip(("fetch", "verify", "decode", "route"), (180, 6, 25, 12) * (0.7 + noise[:4]), strict=True)
            )
            commit = 5.5 + 6 * noise[4] + (28 if version % 17 == 5 else 0)
            timings |= {"rescan": 0.0, "wait": 1.0 + noise[5], "commit": commit, "resume": 0.8}
            timings["pause"] = timings["wait"] + timings["commit"] + timings["resume"]
            recent.append(
                {
                    "version": version,
                    "step": manifest.step,
                    "versions": [version],
                    "changed": manifest.changed,
                    "payload_bytes": manifest.payload_bytes,
                    "timings_ms": {name: round(float(value), 3) for name, value in timings.items()},
                }
            )
        place: dict[str, Any] = {"quarantined": [], "held_back": None, "fingerprint": "0" * 32}
        found: dict[str, Any] = {
            "run": RUN,
            "served": {"version": served, "step": self.writer.manifests[served].step, **place},
            "head": {"version": self.head, "step": self.writer.manifests[self.head].step, **place},
            "lag": self.head - served,
            "state": "idle",
            "last_error": None,
            "policy": "follow",
            "target": "head",
            "holding": False,
            "ready": {"ready": True, "reasons": []},
            "undo": list(range(served - 1, max(0, served - 9), -1)),
            "timings_ms": recent[-1]["timings_ms"] if recent else {},
            "commits": served,
            "polled_seconds": 0.4,
            "fleet": {"receiver": receiver},
            "versions": {"vllm": "0.33.0", "torch": "2.13.0", "vllm_delta_sync": __version__, "tested": True},
            "recent": recent,
        }
        return found | more


def busy_run(folder: Path, layers: int = 28, versions: int = 200, width: int = 48) -> PageRun:
    """A run that several servers follow: one holds, one follows a tag, one cannot reach the store."""
    run = PageRun(folder, layered_table(layers, width), versions)
    run.busy(versions)
    run.writer.tag("best", max(1, versions - 20))
    run.writer.tag("release-1", max(1, versions * 3 // 5))
    run.receiver("rollout-1", versions, step=10 * versions, pause_ms=9.1, lag=0)
    run.receiver("rollout-2", versions, step=10 * versions, pause_ms=8.04, lag=0)
    held = {"holding": True, "state": "held"}
    run.receiver("rollout-3", max(0, versions - 4), pause_ms=7.7, lag=4, **held)
    error = {"kind": "unavailable", "message": "cannot read objects/3d79….safetensors: connection refused, 5 tries"}
    run.receiver("rollout-4", versions - 1, state="staging", pause_ms=9.9, lag=1, error=error)
    run.receiver("eval-1", max(1, versions - 20), following="tag:best", pause_ms=12.0, lag=0)
    run.receiver("eval-2", max(1, versions - 40), state="left", pause_ms=11.0)
    return run


def long_run(folder: Path, versions: int = 10_000) -> PageRun:
    """A run with that many versions, of which the last 15 have their objects."""
    run = PageRun(folder, layered_table(12, 16), versions, 20)
    run.many(versions - 15)
    run.writer.bits[-1] = random_bits(run.writer.table, run.random)
    run.busy(15)
    run.receiver("rollout-1", run.head, pause_ms=8.2, lag=0)
    return run


def empty_run(folder: Path) -> None:
    """A run whose publisher has not published yet."""
    table = layered_table(2, 16)
    RunWriter(open_bucket(str(folder)), table, RUN)


def broken_run(folder: Path) -> PageRun:
    """A run with a damaged manifest, an unsound head, and a server that has lost the model."""
    run = PageRun(folder, layered_table(6, 24), 40)
    run.busy(38)
    run.delta(lambda name: 0.9, ["the update's norm is 52 times the median of the last 50 versions", "loss is NaN"])
    for version in (21, 30):
        (folder / version_key(version)).write_bytes(b'{"format_version":2,"run"')
    error = {
        "kind": "fingerprint",
        "message": "served weights are not version 38: 3 tensors differ: changed from outside",
    }
    run.receiver("rollout-1", 38, state="repairing", error=error, lag=0, pause_ms=8.8)
    run.receiver(
        "rollout-2",
        None,
        state="refused",
        lag=None,
        error={"kind": "chain", "message": "this server's weights are not the run's base: 12 tensors differ"},
    )
    (folder / "heartbeats" / "stray.json").write_bytes(b"not a heartbeat")
    return run


def hostile_run(folder: Path) -> PageRun:
    """A run whose names and texts try to become markup, wherever a stranger can write text."""

    def named(name: str) -> str:
        texts = [text for text in HOSTILE if text.isprintable()]  # others are refused before they are shown
        text = texts[sum(map(ord, name)) % len(texts)]
        return f"model.layers.{name.split('.')[2]}.{text}.{name}" if name.count(".") > 3 else text + name

    run = PageRun(folder, layered_table(4, 16, named), 12)
    run.busy(10)
    run.delta(lambda name: 0.2, list(HOSTILE))
    run.writer.tag("constructor", 3)
    run.writer.tag("__proto__".strip("_"), 4)
    run.receiver("hasOwnProperty", 10, error={"kind": "store", "message": HOSTILE[0] + HOSTILE[1]}, lag=0)
    run.receiver("toString", 9, holding=True, lag=1)
    (folder / "heartbeats" / f"{HOSTILE[0][:20].replace('/', '')}.json").write_bytes(b"{}")
    return run


def hostile_status(run: PageRun) -> dict[str, Any]:
    """A status by a server that is not ours."""
    text = HOSTILE[1]
    return run.status(
        10,
        text,
        state=text,
        target=text,
        last_error={"kind": text, "message": HOSTILE[0]},
        ready={"ready": False, "reasons": list(HOSTILE)},
        run=text,
        versions={"vllm": text},
    )
