"""Byte budgets: what a version sends and holds back, and that nothing is lost, whatever happens in between."""

import logging
import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import write_checkpoint
from tests.support.gating import INF, NAN, disturb, odd_tensors
from tests.support.publishers import FailAt, Hooked, assert_holds, nothing
from tests.support.publishing import Tensors, assert_same, snapshot
from tests.support.seeds import few_by_default
from trainer_side import Budget, Gate, Publisher
from trainer_side.integrations.gathered import gathered_publisher, publish_gathered
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ConflictError, PublishError, UsageError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.tensors.torch_views import bits_of


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({}, "there is no bound"),
        ({"exact_every": 4}, "there is no bound"),
        *(({"max_bytes": value}, "max_bytes is") for value in (0, -1, 1.5, True, "9")),
        *(({"max_share": value}, "max_share is") for value in (0, 1.1, NAN, True, "0.5")),
        *(({"min_change": value}, "min_change is") for value in (0.0, -1, INF, NAN, "1")),
        *(({"max_share": 0.5, "exact_every": value}, "exact_every is") for value in (0, 2.0, True)),
    ],
)
def test_budget_that_makes_no_sense_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"budget: {named}"):
        Budget(**wrong)


def test_values_with_scales_are_refused(bucket: Hooked) -> None:
    with pytest.raises(UsageError, match="tensor 'a' has dtype F8_E4M3"):
        Publisher({"a": torch.zeros(3).to(torch.float8_e4m3fn)}, bucket, budget=Budget(max_share=0.5))
    assert list(bucket.list()) == []


# What is sent


def scores_of(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    """Sizes of changes as the documentation defines them."""
    before, after = old.double().numpy().ravel(), new.double().numpy().ravel()
    found = []
    for one, other in zip(before.tolist(), after.tolist(), strict=True):
        plain = one != 0 and other != 0 and math.isfinite(one) and math.isfinite(other)
        found.append(abs((other - one) / one) if plain else INF)
    return np.array(found, np.float64).astype(np.float32)


@pytest.mark.parametrize("more", [-1, 0, 1, 66_005])
def test_of_equal_changes_the_first_go_out(more: int, bucket: Hooked) -> None:
    """Tensors in the order of their names, and in the last one the first positions, beyond 16 bits of them."""
    live = {"b": torch.ones(2, 50_000), "a": torch.ones(500), "c": torch.ones(9)}
    total = sum(tensor.numel() for tensor in live.values())
    most = 500 + 1 + more
    with Publisher(live, bucket, budget=Budget(max_share=(most + 0.5) / total), merge=False) as publisher:
        live["c"][:1] *= 3
        for tensor in live.values():
            tensor[tensor == 1] = 2
        publisher.publish(1, wait=True)
        publisher.flush()
        held = dict(open_run(bucket.url).tensors(1))
        assert held["c"].tolist() == [3.0] + [1.0] * 8, "the largest goes before all others"
        sent = torch.cat([held["a"], held["b"].view(-1)]) == 2
        assert sent.tolist() == [True] * (most - 1) + [False] * (total - 9 - (most - 1))
        assert publisher.publish(2, exact=True).changed == total - most
    assert_holds(bucket, 2, live)


@pytest.mark.parametrize("codec", ["plain", "tiled", "raw"])
def test_no_version_exceeds_its_bytes(codec: Any, bucket: Hooked) -> None:
    """The first estimate is too high for one dtype and too low for the other; both end within the bound."""
    torch.manual_seed(1)
    live = {"a": torch.randn(60_000).bfloat16(), "b": torch.randn(20_000, dtype=torch.float64)}
    with Publisher(live, bucket, codec=codec, budget=Budget(max_bytes=20_000), merge=False) as publisher:
        for step in range(1, 5):
            live["a"] *= 1 + 0.02 * torch.randn(60_000)
            live["b"] *= 1 + 0.02 * torch.randn(20_000)
            publisher.publish(step, wait=True)
        publisher.flush()
        sizes = [manifest.payload_bytes for manifest in open_run(bucket.url).log()][1:]
        assert all(size <= 20_000 for size in sizes)
        assert min(sizes[1:]) > 15_000, "the budget is used"
    assert_holds(bucket, 5, live)
    assert open_run(bucket.url).verify().replayed


def test_integers_beyond_the_bytes_are_sent_all_the_same(bucket: Hooked, caplog: pytest.LogCaptureFixture) -> None:
    live = {"a": torch.ones(100), "n": torch.arange(3000)}
    with Publisher(live, bucket, budget=Budget(max_bytes=900), merge=False) as publisher:
        live["a"] += 1
        live["n"].random_()
        result = publisher.publish(1)
        assert result.held_back is not None
        assert result.held_back.elements == 100
        assert result.payload_bytes > 900
        assert "integer elements, always sent, take" in caplog.text


def test_integers_that_fill_the_budget_alone_are_sent_as_without_one(bucket: Hooked) -> None:
    live = {"a": torch.ones(100), "n": torch.zeros(1000, dtype=torch.int32)}
    with Publisher(live, bucket, codec="raw", budget=Budget(max_share=0.1), merge=False) as publisher:
        live["n"][1:] = 7
        assert publisher.publish(1, wait=True).held_back is None
    assert open_run(bucket.url).manifest(1).changed == 1000, "the tensor is sent in full"


def test_budget_that_holds_nothing_back_writes_what_none_writes(tmp_path: Path) -> None:
    same = {"changed", "payload_bytes", "held_back"}
    found = []
    for name, budget in (("with", Budget(max_share=1.0)), ("without", None)):
        torch.manual_seed(2)
        live = {"a": torch.randn(5000).bfloat16(), "b": torch.randn(2000)}
        with Publisher(live, str(tmp_path / name), codec="raw", budget=budget, merge=False) as publisher:
            live["a"][::4] *= 1.5
            live["b"][::2] *= 1.5
            publisher.publish(1)
        found.append(open_run(str(tmp_path / name)).manifest(1).model_dump(include=same))
    assert found[0] == found[1]
    assert found[0]["changed"] == 1250 + 2000, "one tensor is sent in full"


# When a version is exact


def test_exact_version_is_published_between_every_kth_call(bucket: Hooked) -> None:
    live = {"a": torch.ones(50)}
    with Publisher(live, bucket, every=3, budget=Budget(max_share=0.1)) as publisher:
        live["a"] *= 2
        assert publisher.publish(1).version is None
        assert publisher.publish(2, exact=True).version == 1
        assert publisher.publish(3, wait=True).held_back is None


def publish_and_fail(publisher: Publisher, live: Tensors) -> None:
    with publisher:
        live["a"] *= 1.1
        publisher.publish(1)
        raise RuntimeError("training ends in the middle of a step")


def test_close_adds_no_version_without_need(bucket: Hooked) -> None:
    live = {"a": torch.ones(50)}
    Publisher(live, bucket, budget=Budget(max_share=0.1)).close()
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        publish_and_fail(Publisher(live, bucket, budget=Budget(max_share=0.1)), live)
    # Nothing was published here.
    Publisher(live, bucket, budget=Budget(max_share=0.1)).close()
    assert [manifest.held_back is None for manifest in open_run(bucket.url).log()] == [True, False]


@pytest.mark.parametrize("later", [Budget(max_share=0.1), None])
def test_streamed_weights_that_lack_a_tensor(
    later: Budget | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was held back of a tensor that a call lacks is not exact, and counts."""
    url, live = str(tmp_path / "run"), {"a": torch.ones(20), "b": torch.ones(20)}
    base = write_checkpoint(tmp_path / "base", live)
    publisher = gathered_publisher(url, base, budget=Budget(max_share=0.1), merge=False)
    assert publisher is not None
    live = {name: 2 * tensor for name, tensor in live.items()}
    assert publisher.publish(1, weights=live.items()).held_back.elements == 36  # type: ignore[union-attr]
    only_b = publisher.publish(2, weights=[("b", live["b"])], exact=True).held_back
    assert only_b is not None
    assert only_b.elements == 16
    assert only_b.relative_norm == pytest.approx(math.sqrt(16 / (20 * 4 + 4 * 4 + 16)), rel=1e-5)
    with caplog.at_level(logging.WARNING):
        publisher.close()
    assert "version 2, the last one, is not exact: 16 changed elements are held back" in caplog.text
    # The next publisher, with a budget or without, does not know which tensor it is until it has seen both.
    publisher = gathered_publisher(url, base, budget=later, merge=False)
    assert publisher is not None
    only_b = publisher.publish(3, weights=[("b", live["b"])], exact=True).held_back
    assert only_b is not None
    assert (only_b.elements, only_b.exact) == (16, 0)
    assert publish_gathered(publisher, 4, live.items(), exact=True).held_back is None  # type: ignore[union-attr]
    publisher.close()
    assert_same(dict(open_run(url).tensors(4)), live)


def test_gate_judges_what_is_sent(bucket: Hooked) -> None:
    live = {"a": torch.ones(100)}
    gate, budget = Gate(max_changed_share=0.5), Budget(max_share=0.4)
    with Publisher(live, bucket, gate=gate, budget=budget, merge=False) as publisher:
        live["a"] *= 2
        assert publisher.publish(1).held_back.elements == 60  # type: ignore[union-attr]
        with pytest.raises(PublishError, match="max_changed_share"):
            publisher.publish(2, exact=True).held_back  # noqa: B018
        for step, left in ((3, 20), (4, 0)):
            found = publisher.publish(step, wait=True).held_back
            assert (0 if found is None else found.elements) == left
    assert_holds(bucket, 3, live)


# Nothing is lost


class World:
    """A trainer, its publisher and its run, and what the run must hold."""

    def __init__(self, folder: Path, budget: Budget, codec: Any) -> None:
        self.live = odd_tensors()
        del self.live["e"]  # which no budget takes
        self.bucket, self.budget, self.codec = Hooked(folder / "run"), budget, codec
        self.versions = [snapshot(self.live)]
        self.base = 0
        self.last_exact = 0
        self.publisher = self.start()

    def start(self) -> Publisher:
        return Publisher(self.live, self.bucket, codec=self.codec, budget=self.budget, merge=False)

    def rebase(self, version: int) -> None:
        self.base = version % len(self.versions)
        self.publisher.rebase(self.base)

    def crash(self) -> None:
        """Another publisher takes over, before this one is closed."""
        former, self.publisher = self.publisher, self.start()
        self.base = len(self.versions) - 1
        with suppress(ConflictError):
            former.close()

    def restart(self) -> None:
        self.publisher.close()
        self.find_added()
        self.publisher = self.start()
        self.base = len(self.versions) - 1

    def find_added(self) -> None:
        """The version that ``close`` adds is exact."""
        log = list(open_run(self.bucket.url).log())
        if len(log) > len(self.versions):
            self.check(log[-1], exact=True)
        assert len(log) == len(self.versions)

    def publish(self, exact: bool = False) -> None:
        try:
            found = self.publisher.publish(1, wait=True, exact=exact)
            held = found.held_back
        except PublishError as error:
            assert "injected" in error.message  # noqa: PT017
            return
        finally:
            self.bucket.before = nothing
        manifest = open_run(self.bucket.url).manifest(len(self.versions))
        assert manifest.held_back == held
        every = self.budget.exact_every
        due = every is not None and manifest.version - self.last_exact >= every
        self.check(manifest, exact or due)
        baseline = self.publisher._committer.baseline
        here = {spec.name: baseline.read(number) for number, spec in enumerate(baseline.table)}
        assert all(np.array_equal(here[name], bits_of(tensor)) for name, tensor in self.versions[-1].items())

    def check(self, manifest: Manifest, exact: bool) -> None:
        """Compare a version with the weights and with the version before, element by element."""
        now, before = dict(open_run(self.bucket.url).tensors(manifest.version)), self.versions[self.base]
        assert manifest.base_version == self.base
        sent: list[np.ndarray] = []
        left: list[np.ndarray] = []
        places: list[tuple[float, int, int, bool]] = []
        elements = integers = 0
        distance = norm = 0.0
        for name, live in self.live.items():
            old, held, new = (bits_of(tensor).ravel() for tensor in (before[name], now[name], live))
            assert ((held == old) | (held == new)).all(), "an element is either as before or as it is now"
            kept = held != new
            elements += int(kept.sum())
            if not live.is_floating_point():
                assert not kept.any()
                integers += int((old != new).sum())
                continue
            scores = scores_of(before[name], live)
            sent.append(scores[(held == new) & (old != new)])
            left.append(scores[kept])
            places += [(-float(scores[at]), len(sent), at, not kept[at]) for at in np.flatnonzero(old != new).tolist()]
            values, ours = now[name].double().numpy().ravel(), live.double().numpy().ravel()
            both = np.isfinite(values) & np.isfinite(ours)
            distance += float(((ours[both] - values[both]) ** 2).sum())
            norm += float((values[np.isfinite(values)] ** 2).sum())
        self.versions.append({name: tensor.clone() for name, tensor in now.items()})
        self.base = manifest.version
        assert (0 if manifest.held_back is None else manifest.held_back.elements) == elements
        if manifest.held_back is None:
            self.last_exact = manifest.version
        else:
            assert manifest.held_back.exact == self.last_exact
            assert manifest.held_back.relative_norm == pytest.approx(math.sqrt(distance / norm), rel=1e-4, abs=1e-12)
        if exact:
            assert not elements
            return
        went, stayed = np.concatenate(sent), np.concatenate(left)
        bound = self.budget
        if bound.max_bytes is not None:
            assert manifest.payload_bytes <= bound.max_bytes or (not went.size and integers)
        if bound.max_share is not None:
            most = max(0, int(bound.max_share * manifest.total) - integers)
            assert went.size <= most
            eligible = int((np.concatenate([went, stayed]) >= np.float32(bound.min_change or 0)).sum())
            assert bound.max_bytes is not None or went.size == min(most, eligible)
        if bound.min_change is not None:
            assert (went >= np.float32(bound.min_change)).all()
        ordered = [goes for *_, goes in sorted(places)]
        assert ordered == sorted(ordered, reverse=True), "what goes is the beginning of the order"


STEPS = st.one_of(
    st.tuples(st.sampled_from(["few", "all", "all", "odd"]), st.sampled_from("abcdf"), st.integers(0, 2**16)),
    st.tuples(st.just("exact"), st.none(), st.none()),
    st.tuples(st.just("rebase"), st.none(), st.integers(0, 30)),
    st.tuples(st.sampled_from(["crash", "restart"]), st.none(), st.none()),
    st.tuples(st.just("fail"), st.sampled_from(["objects/", "versions/"]), st.none()),
)
BUDGETS = st.builds(
    Budget,
    max_bytes=st.one_of(st.none(), st.integers(1, 3000)),
    max_share=st.floats(0.001, 1.0),
    min_change=st.sampled_from([None, 1e-6, 0.05]),
    exact_every=st.sampled_from([None, None, 1, 3]),
)


@given(st.lists(STEPS, min_size=1, max_size=12), BUDGETS, st.sampled_from(["plain", "tiled", "raw"]))
@few_by_default(15)
def test_nothing_is_lost(steps: list[tuple[str, Any, Any]], budget: Budget, codec: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), budget, codec)
        actions: dict[str, Callable[[], None]] = {"crash": world.crash, "restart": world.restart}
        try:
            for how, what, value in steps:
                if how in actions:
                    actions[how]()
                elif how == "rebase":
                    world.rebase(value)
                elif how == "exact":
                    world.publish(exact=True)
                else:
                    if how == "fail":
                        world.bucket.before = FailAt(what)
                    else:
                        disturb(world.live[what], value, how)
                    world.publish()
            world.publish(exact=True)
        finally:
            world.publisher.close()
        world.find_added()
        assert_holds(world.bucket, world.base, world.live)
        report = open_run(world.bucket.url).verify()
        assert (report.versions, report.replayed) == (len(world.versions), True)
        for version, expected in enumerate(world.versions):
            assert_holds(world.bucket, version, expected)
