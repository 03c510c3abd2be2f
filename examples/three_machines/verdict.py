"""The verdict, from what was seen and from the bucket alone: what became of each trajectory, and of each version."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from examples.demo.verdict import checkpoint_fingerprint
from examples.three_machines import fits
from examples.three_machines.record import Record, Version
from examples.three_machines.settings import NEEDED_RISE, NEEDED_VERSIONS, ROLLOUT, TRAINER
from examples.three_machines.state import Consumed
from examples.three_machines.trainer import SIDECAR
from examples.three_machines.trajectories import PREFIX, Batch, decode, place_of
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.wire.manifest import Manifest

PROVEN_VERSIONS = 8
PROVEN_TURNS = 192
"""Of each of them, evenly over the batches."""
TOLERANCE = 0.02
"""Root mean square of the differences of log-probs under the right version: the server computes in bfloat16, by other
kernels."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Found:
    """What lies in the store: manifests from version 1 on, what each version consumed, and all trajectories by key."""

    url: str
    run: str
    head: str
    manifests: Mapping[int, Manifest]
    consumed: Mapping[int, Consumed]
    batches: Mapping[str, Batch]


@dataclass(frozen=True)
class Explained:
    """How well a version, and the ones beside it, explain the tokens of the spans that name it.

    Attributes:
        own, beside: root mean square difference of log-probs; ``beside`` of the better one.
    """

    version: int
    tokens: int
    own: float
    beside: float


def read_store(run_url: str, trajectories: str) -> Found:
    """Everything that the verdict needs. Raises DeltaSyncError: something is damaged or missing."""
    run = open_run(run_url)
    manifests = {manifest.version: manifest for manifest in run.log() if manifest.version > 0}
    consumed = {
        version: Consumed.from_bytes(run.sidecar(version, SIDECAR), f"version {version}: {SIDECAR}")
        for version in sorted(manifests)
    }
    with open_bucket(trajectories) as bucket:
        keys = [item.key for item in bucket.list(PREFIX)]
        batches = {key: decode(bucket.get(key), key) for key in keys}
    head = run.head()
    return Found(run_url, run.info.run, head.fingerprint, manifests, consumed, batches)


def judge(record: Record, found: Found, checkpoint: Path) -> None:
    """Put claims, what is wrong, and figures into the record. Raises DeltaSyncError: a version cannot be rebuilt."""
    record.versions = versions_of(found)
    record.stale = sum(len(one.stale) for one in found.consumed.values())
    explained = explain(found, checkpoint)
    prints = {
        "the server": str(record.scan.get("fingerprint")),
        "the run's head": found.head,
        "the trainer's checkpoint": checkpoint_fingerprint(checkpoint),
    }
    wrong = {
        "weights_exact": []
        if record.scan.get("verdict") and len(set(prints.values())) == 1
        else [f"weights: {prints}"],
        "never_connected": not_connected(record),
        "told_nothing": record.told or ([] if record.read else ["no process was looked at"]),
        "went_on": [f"it did not go on after {part} was killed" for part in unrecovered(record)],
        "trained_once": trained_once(found),
        "none_too_stale": too_stale(found, record.options.max_staleness),
        "versions_explain_tokens": unexplained(explained),
    }
    if not record.shared:
        wrong["no_way_between"] = ways(record)
    if record.options.versions >= NEEDED_VERSIONS:
        first, last = record.rewards()
        rose = last - first >= NEEDED_RISE
        wrong["reward_rose"] = [] if rose else [f"the reward rose from {first:.3f} to {last:.3f} only"]
    record.claims = {claim: not texts for claim, texts in wrong.items()}
    record.wrong = [text for texts in wrong.values() for text in texts]
    record.figures = {
        "fingerprints": prints,
        "batches": len(found.batches),
        "trained": sum(len(one.trained) for one in found.consumed.values()),
        "explained": [vars(one) for one in explained],
    }


def versions_of(found: Found) -> list[Version]:
    """What each version changed, and what it was trained on."""
    made = []
    for version, manifest in sorted(found.manifests.items()):
        games = [
            game
            for key in found.consumed[version].trained
            if key in found.batches
            for game in found.batches[key].games
        ]  # fmt: skip
        made.append(
            Version(
                version=version,
                changed=manifest.changed,
                total=manifest.total,
                payload_bytes=manifest.payload_bytes,
                full_bytes=manifest.full_bytes,
                batches=len(found.consumed[version].trained),
                staleness=max((version - 1 - found.batches[key].lowest for key in _trained(found, version)), default=0),
                reward=statistics.fmean(game.reward for game in games) if games else None,
                solved=statistics.fmean(game.solved for game in games) if games else None,
            )
        )
    return made


def not_connected(record: Record) -> list[str]:
    """What the looks at all sockets found; and whether there was anything to see."""
    blind = [name for name in (TRAINER, ROLLOUT) if not record.seen[name]]
    return [*record.found, *(f"no connection of {name} was seen at {record.looks} looks" for name in blind)]


def ways(record: Record) -> list[str]:
    """Attempts to connect that ended otherwise than they should: each machine reaches itself, and no other."""
    wrong = [
        f"{one.source} → {one.target}: {one.reason}"
        for one in record.attempts
        if one.reached is not (one.source == one.target)
    ]
    return wrong if record.attempts else ["no attempt was made"]


def unrecovered(record: Record) -> list[str]:
    """Parts that should have been killed and were not, or after whose kill it did not go on."""
    return sorted(set(record.options.kills_at) - {kill.part for kill in record.kills if kill.going is not None})


def trained_once(found: Found) -> list[str]:
    """Each trajectory is consumed by one version or is left over at the end, and nothing else is consumed."""
    wrong = []
    fates = {
        fate: Counter(key for one in found.consumed.values() for key in getattr(one, fate))
        for fate in ("trained", "stale", "set_aside")
    }
    total = sum(fates.values(), Counter())
    wrong += [f"{key} was consumed {count} times" for key, count in total.items() if count > 1]
    wrong += [f"{key} was consumed, and is not there" for key in total if key not in found.batches]
    wrong += [f"{key} was set aside" for key in fates["set_aside"]]
    steps = [found.consumed[version].step for version in sorted(found.consumed)]
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"steps do not follow each other: {steps}")
    last: dict[str, int] = {}
    for worker, number in filter(None, map(place_of, total)):
        last[worker] = max(last.get(worker, -1), number)
    for key, batch in found.batches.items():
        if batch.run != found.run:
            wrong.append(f"{key} is of run {batch.run}")
        if key not in total and batch.number <= last.get(batch.worker, -1):
            wrong.append(f"{key} was lost: later ones were consumed")
    return wrong


def too_stale(found: Found, most: int) -> list[str]:
    """Trajectories that were trained on too late, or too early, or passed by without reason."""
    wrong = []
    for version, one in found.consumed.items():
        held = version - 1
        for key in _trained(found, version):
            batch = found.batches[key]
            if held - batch.lowest > most or batch.highest > held:
                wrong.append(f"{key}, of versions {batch.lowest} to {batch.highest}, was trained on by version {held}")
        for key in one.stale:
            if key in found.batches and held - found.batches[key].lowest <= most:
                wrong.append(f"{key}, of version {found.batches[key].lowest}, was passed by as too old at {held}")
    return wrong


def _trained(found: Found, version: int) -> list[str]:
    return [key for key in found.consumed[version].trained if key in found.batches]


def explain(found: Found, checkpoint: Path) -> list[Explained]:
    """Recompute log-probs of trained tokens with the weights that their spans name, and with those beside them.

    Args:
        checkpoint: of the same model; its weights are not used.
    """
    keys = [key for version in sorted(found.consumed) for key in _trained(found, version)]
    turns: dict[int, list[fits.Answered]] = {}
    for key in keys:
        for game in found.batches[key].games:
            for turn in game.turns:
                spans = [fits.Span(span.version, span.start, span.end) for span in turn.spans]
                answered = fits.Answered(turn.prompt, turn.output, turn.logprobs, spans)
                for span in spans:
                    turns.setdefault(span.version or 0, []).append(answered)
    chosen = evenly(sorted(turns), PROVEN_VERSIONS)
    sample = {id(one): one for version in chosen for one in evenly(turns[version], PROVEN_TURNS)}
    tried = fits.fits_of(list(sample.values()), found.url, checkpoint, lambda version: None)
    return [pooled(version, [fit for fit in tried if fit.span.version == version]) for version in chosen]


def evenly(items: Sequence[_Item], count: int) -> list[_Item]:
    """So many of them, first and last included."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def pooled(version: int, tried: Sequence[fits.Fit]) -> Explained:
    """All spans of a version as one."""
    tokens = sum(fit.span.end - fit.span.start for fit in tried)

    def difference(of: int) -> float:
        squares = [fit.by_version[of] ** 2 * (fit.span.end - fit.span.start) for fit in tried]
        return math.sqrt(sum(squares) / tokens)

    others = [of for of in tried[0].by_version if of != version]
    return Explained(version, tokens, difference(version), min(map(difference, others)))


def unexplained(explained: Sequence[Explained]) -> list[str]:
    """Versions that do not explain their tokens, or no better than a version beside them does."""
    wrong = [
        f"version {one.version} explains its {one.tokens} tokens to {one.own:.4f}, one beside it to {one.beside:.4f}"
        for one in explained
        if one.own > TOLERANCE or one.own >= one.beside
    ]
    return wrong if explained else ["no trajectory was trained on"]
