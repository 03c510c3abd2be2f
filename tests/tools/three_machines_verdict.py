"""Judges a run of ``examples/three_machines`` by the bucket, and writes summary.json.

    python -m tests.tools.three_machines_verdict --bucket RUN --games URL --out DIR --versions 120

Exit status 0 if every claim holds, else 1. ``DIR/trainer`` and ``DIR/rollout`` have the events of the example's scripts
(``events.jsonl``); everything else is read from the bucket.
"""

import argparse
import gzip
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.tensors.checkpoint import Checkpoint

ENDS = 20
"""Versions at the beginning and at the end whose mean rewards are compared."""
NEEDED_VERSIONS, NEEDED_RISE = 100, 0.15
"""A run of fewer versions need not learn."""
PROVEN_VERSIONS, PROVEN_TURNS = 8, 192
TOLERANCE = 0.02
"""Root mean square of the differences of log-probs: the server computes in bfloat16, by other kernels."""


@dataclass
class Found:
    """The content of the bucket and of the events.

    Attributes:
        consumed: version → its sidecar ``trained``. batches: key → trajectories. served, called: version → time.
        scan: the server's rescan of its weights at the end.
    """

    run: Any
    manifests: dict[int, Any]
    consumed: dict[int, dict[str, Any]]
    batches: dict[str, dict[str, Any]]
    served: dict[int, float] = field(default_factory=dict)
    called: dict[int, float] = field(default_factory=dict)
    pauses_ms: dict[str, float] = field(default_factory=dict)
    scan: dict[str, Any] = field(default_factory=dict)

    def trained(self, version: int) -> list[dict[str, Any]]:
        """The batches that a version was trained on."""
        return [self.batches[key] for key in self.consumed[version]["trained"] if key in self.batches]


def read(run_url: str, games_url: str, out: Path) -> Found:
    """Read everything that the verdict needs."""
    run = open_run(run_url)
    manifests = {manifest.version: manifest for manifest in run.log() if manifest.version > 0}
    consumed = {version: json.loads(run.sidecar(version, "trained")) for version in sorted(manifests)}
    with open_bucket(games_url) as bucket:
        keys = [item.key for item in bucket.list("trajectories/")]
        found = Found(run, manifests, consumed, {key: json.loads(gzip.decompress(bucket.get(key))) for key in keys})
    for file in (out / "trainer" / "events.jsonl", out / "rollout" / "events.jsonl"):
        # Libraries sometimes print to standard output, too.
        for event in [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]:
            if event["event"] == "published":
                found.called.setdefault(event["version"], event["called"])
            elif event["event"] == "served":
                # A server that jumps to a version has served all versions before it.
                for version in range(max(found.served, default=-1) + 1, event["version"] + 1):
                    found.served[version] = event["at"]
                found.pauses_ms |= {number: ms for number, ms in event["pauses_ms"].items() if ms is not None}
            elif event["event"] == "verified":
                found.scan = event
    return found


def checkpoint_fingerprint(folder: Path) -> str:
    """Fingerprint of a checkpoint, computed from its files alone."""
    checkpoint, total = Checkpoint(folder), Fingerprint()
    for name in checkpoint.specs:
        total += fingerprint_tensor(name, checkpoint.bits(name))
    return total.hex()


def not_exact(found: Found, checkpoint: Path) -> list[str]:
    """The server's weights, rescanned, equal the run's head and the checkpoint that the trainer saved."""
    prints = {
        "server": found.scan.get("fingerprint"),
        "run": found.run.head().fingerprint,
        "checkpoint": checkpoint_fingerprint(checkpoint),
    }
    return [] if found.scan.get("verdict") and len(set(prints.values())) == 1 else [f"weights differ: {prints}"]


def not_once(found: Found) -> list[str]:
    """Each trajectory is consumed by one version or left over at the end, and nothing else is consumed."""
    fates = ("trained", "stale", "set_aside")
    total = Counter(key for one in found.consumed.values() for fate in fates for key in one[fate])
    wrong = [f"{key} was consumed {count} times" for key, count in total.items() if count > 1]
    wrong += [f"{key} was consumed, and is not there" for key in total if key not in found.batches]
    wrong += [f"{key} was set aside" for one in found.consumed.values() for key in one["set_aside"]]
    steps = [found.consumed[version]["step"] for version in sorted(found.consumed)]
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"steps do not follow each other: {steps}")
    last: dict[str, str] = {}
    for key in sorted(total):
        last[key.split("/")[1]] = key
    for key, batch in found.batches.items():
        if batch["run"] != found.run.info.run:
            wrong.append(f"{key} is of run {batch['run']}")
        if key not in total and key < last.get(batch["worker"], ""):
            wrong.append(f"{key} was lost: later ones were consumed")
    return wrong


def versions_of(batch: dict[str, Any]) -> tuple[int, int]:
    """Lowest and highest version that sampled a token."""
    spans = [span["version"] for game in batch["games"] for turn in game["turns"] for span in turn["spans"]]
    return min(spans), max(spans)


def too_stale(found: Found, most: int) -> list[str]:
    """Batches that were trained on were young enough, and batches left out as too old were not."""
    wrong = []
    for version, one in found.consumed.items():
        before = version - 1
        for batch in found.trained(version):
            lowest, highest = versions_of(batch)
            if before - lowest > most or highest > before:
                text = f"batch {batch['number']} of versions {lowest} to {highest}"
                wrong.append(f"{text} was trained on by version {before}")
        for key in one["stale"]:
            if key in found.batches and before - versions_of(found.batches[key])[0] <= most:
                wrong.append(f"{key} was left out as too old at version {before}")
    return wrong


def unexplained(found: Found, policy: Path) -> list[str]:
    """Trained tokens whose log-probs do not fit the version of their span, or fit a neighbouring one as well.

    They are recomputed with weights from the bucket, of the version itself and of its two neighbours.
    """
    turns: dict[int, list[dict[str, Any]]] = {}
    for version in sorted(found.consumed):
        for turn in (turn for batch in found.trained(version) for game in batch["games"] for turn in game["turns"]):
            if len(turn["spans"]) == 1:
                turns.setdefault(turn["spans"][0]["version"], []).append(turn)
    wrong = []
    for version in evenly(sorted(turns), PROVEN_VERSIONS):
        sample = evenly(turns[version], PROVEN_TURNS)
        beside = [near for near in (version - 1, version + 1) if 0 <= near <= max(found.manifests)]
        own, *others = [difference(weights_of(found, policy, near), sample) for near in (version, *beside)]
        if own > TOLERANCE or own >= min(others):
            wrong.append(f"version {version} explains its tokens to {own:.4f}, one beside it to {min(others):.4f}")
    return wrong if turns else ["no trajectory was trained on"]


def evenly(items: list[Any], count: int) -> list[Any]:
    """``count`` evenly spaced items, including the first and the last."""
    return items if len(items) <= count else [items[round(at * (len(items) - 1) / (count - 1))] for at in range(count)]


def weights_of(found: Found, policy: Path, version: int) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in found.run.tensors(version)}, strict=False)
    return model.eval()


def difference(model: Qwen3ForCausalLM, turns: Sequence[dict[str, Any]]) -> float:
    """Root mean square between the log-probs of these turns' tokens under a model and as they were sampled."""
    rows = [turn["prompt"] + turn["output"] for turn in turns]
    tokens = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    squares = [
        (float(logprobs[number, len(turn["prompt"]) - 1 + at]) - value) ** 2
        for number, turn in enumerate(turns)
        for at, value in enumerate(turn["logprobs"])
    ]
    return math.sqrt(statistics.fmean(squares))


def curve_of(found: Found) -> list[dict[str, Any]]:
    """Each version: bytes, reward and solved games of what it was trained on, staleness, seconds to fresh."""
    rows = []
    for version, manifest in sorted(found.manifests.items()):
        games = [game for batch in found.trained(version) for game in batch["games"]]
        fresh = found.served.get(version, math.inf) - found.called.get(version, math.inf)
        ages = [version - 1 - versions_of(batch)[0] for batch in found.trained(version)]
        row = {name: getattr(manifest, name) for name in ("version", "changed", "total", "payload_bytes", "full_bytes")}
        row |= {"reward": statistics.fmean(game["reward"] for game in games) if games else 0.0}
        row |= {"solved": statistics.fmean(game["solved"] for game in games) if games else 0.0}
        rows.append(row | {"staleness": max(ages, default=0), "fresh": fresh if math.isfinite(fresh) else None})
    return rows


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last values."""
    count = max(1, min(ENDS, len(values) // 3))
    return (statistics.fmean(values[:count]), statistics.fmean(values[-count:])) if values else (0.0, 0.0)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "longest": None}
    return {"median": round(statistics.median(values), 4), "longest": round(max(values), 4)}


def judge(found: Found, options: argparse.Namespace) -> dict[str, Any]:
    """The content of summary.json."""
    curve = curve_of(found)
    rewards, solved = (ends([row[name] for row in curve]) for name in ("reward", "solved"))
    wrong = {
        "weights_exact": not_exact(found, options.out / "trainer" / "checkpoint"),
        "trained_once": not_once(found),
        "none_too_stale": too_stale(found, options.max_staleness),
        "versions_explain_tokens": unexplained(found, options.out / "trainer" / "policy"),
    }
    if options.versions >= NEEDED_VERSIONS:
        rose = rewards[1] - rewards[0] >= NEEDED_RISE
        wrong["reward_rose"] = [] if rose else [f"the reward rose from {rewards[0]:.3f} to {rewards[1]:.3f} only"]
    changed, total = (sum(row[name] for row in curve) for name in ("changed", "total"))
    times = [*found.called.values(), *found.served.values()]
    return {
        "verdict": {claim: not texts for claim, texts in wrong.items()},
        "wrong": [text for texts in wrong.values() for text in texts],
        "reward": {"first": round(rewards[0], 4), "last": round(rewards[1], 4)},
        "solved": {"first": round(solved[0], 4), "last": round(solved[1], 4)},
        "versions": max(found.manifests, default=0),
        "network": options.network,
        "payload_bytes": sum(row["payload_bytes"] for row in curve),
        "full_bytes": sum(row["full_bytes"] for row in curve),
        "changed_share": round(changed / max(1, total), 6),
        "fresh_seconds": spread([row["fresh"] for row in curve if row["fresh"] is not None]),
        "pause_ms": spread(list(found.pauses_ms.values())),
        "batches": len(found.batches),
        "stale_batches": sum(len(one["stale"]) for one in found.consumed.values()),
        "seconds": round(max(times) - min(times), 1) if times else 0.0,
        "curve": curve,
    }


def main(arguments: Sequence[str]) -> int:
    """Judge as the module's docstring says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.three_machines_verdict",
        description="Judge a run of the three machines; exit status 0 if all claims hold.",
    )
    parser.add_argument("--bucket", required=True, metavar="RUN", help="the run")
    parser.add_argument("--games", required=True, metavar="URL", help="bucket of the trajectories")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="with the folders trainer and rollout")
    parser.add_argument("--versions", required=True, type=int, metavar="N", help="that the run was to have")
    parser.add_argument("--max-staleness", type=int, default=4, help="that the trainer allowed (default %(default)s)")
    parser.add_argument("--network", default="", metavar="TEXT", help="noted in summary.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = read(options.bucket, options.games, options.out)
    summary = judge(found, options)
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for claim, holds in summary["verdict"].items():
        print(f"{'✓' if holds else '✗'} {claim.replace('_', ' ')}")
    for text in summary["wrong"]:
        print(text)
    return 0 if all(summary["verdict"].values()) and summary["versions"] >= options.versions else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
