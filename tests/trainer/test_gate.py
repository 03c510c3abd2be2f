"""The gate: what it finds in a version, and whether that is refused or published as quarantined, for how long."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import write_checkpoint
from tests.support.gating import INF, NAN, disturb, marks, odd_tensors, refused
from tests.support.publishers import FailAt, Hooked, Trainer, assert_holds, left_to_the_test, left_unfinished
from tests.support.publishing import damage, snapshot
from tests.support.seeds import few_by_default
from trainer_side import Gate, Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import GateError, PublishError, UsageError
from vllm_delta_sync.format.manifest import Quarantine
from vllm_delta_sync.format.table import DTYPES, count_nonfinite, has_values, values_of
from vllm_delta_sync.maintenance.compact import maintain
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of

REAL = [name for name, element in DTYPES.items() if has_values(element)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"nonfinite": 1}, {"max_changed_share": 0}, {"max_changed_share": 1.1}, {"max_changed_share": "0.5"},
        {"max_changed_share": True}, {"max_norm_jump": 0.0}, {"max_norm_jump": INF}, {"max_norm_jump": NAN},
        {"action": "warn"},
    ],
)  # fmt: skip
def test_bound_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Gate(**wrong)


# What bits mean


@pytest.mark.parametrize("dtype", REAL)
def test_values_are_those_of_torch(dtype: str) -> None:
    element = DTYPES[dtype]
    random = np.random.default_rng(0)
    if element.itemsize <= 2:
        bits = np.arange(1 << 8 * element.itemsize).astype(element.uint)
    else:
        bits = np.frombuffer(random.bytes(8000), element.uint)
        exponents = 0x7F80_0000 if dtype == "F32" else 0x7FF0 << 48
        odd = [0, 1, exponents, exponents + 1, exponents | 1 << (8 * element.itemsize - 1), exponents - 1]
        bits = np.concatenate([bits, np.array(odd, element.uint)])
    tensor = torch.from_numpy(bits.view(f"<i{element.itemsize}")).view(TORCH_DTYPES[dtype])
    expected = tensor.float().double() if element.itemsize == 1 else tensor.double()
    assert np.array_equal(values_of(element, bits), expected.numpy(), equal_nan=True)
    assert count_nonfinite(element, bits) == int((~torch.isfinite(expected)).sum()) > 0
    for other in DTYPES.values():
        assert has_values(other) or count_nonfinite(other, np.full(9, -1).astype(other.uint)) == 0


# Refuse


@pytest.mark.parametrize(
    ("dtype", "bad"),
    # F8_E4M3 has no infinity: torch makes its largest number of one.
    [("F8_E4M3", NAN), ("F8_E5M2", INF), ("BF16", NAN), ("F16", -INF), ("F32", INF), ("F64", NAN)],
)
def test_what_is_not_finite_is_refused(dtype: str, bad: float, bucket: Hooked) -> None:
    live = {"fine": torch.ones(50), "hurt": torch.ones(300, dtype=torch.float32).to(TORCH_DTYPES[dtype])}
    with Publisher(live, bucket, gate=Gate()) as publisher:
        live["hurt"][[7, 8]] = torch.tensor(bad).to(TORCH_DTYPES[dtype])
        assert "became NaN or infinite: 2 in tensor 'hurt'; nonfinite is True" in refused(publisher)
        assert "2 in tensor 'hurt'" in refused(publisher), "it is judged again"
        live["hurt"][[7, 8]] = torch.tensor(2.0).to(TORCH_DTYPES[dtype])
        result = publisher.publish(2)
        assert (result.version, result.changed, result.quarantined) == (1, 2, ())
    assert marks(bucket) == [0, 1]
    assert_holds(bucket, 1, live)


def test_refused_version_is_raised_by_the_next_call_and_leaves_no_trace(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, gate=Gate()) as publisher:
        there = {info.key for info in bucket.list()}
        trainer.step()
        trainer.live["a"][5] = NAN
        result = publisher.publish(1)
        with pytest.raises(GateError, match=r"version 1 \(step 1\) is not published: .* in tensor 'a'"):
            publisher.publish(2, wait=True)
        with pytest.raises(GateError):
            _ = result.quarantined
        assert {info.key for info in bucket.list()} == there
        trainer.live["a"][5] = 1
        publisher.publish(3, wait=True)
    assert_holds(bucket, 1, trainer.live)


def test_integers_nothing_and_what_no_bound_asks_for_are_let_pass(bucket: Hooked) -> None:
    live = {"n": torch.zeros(10, dtype=torch.int16), "e": torch.zeros(0), "f": torch.zeros(9)}
    with Publisher(live, bucket, gate=Gate(max_norm_jump=0.1)) as publisher:
        live["n"] -= 1
        assert publisher.publish(1).quarantined == ()
    with Publisher(live, bucket, gate=Gate(nonfinite=False)) as publisher:
        live["f"][:] = NAN
        assert publisher.publish(2).quarantined == ()


def test_share_above_the_bound_is_refused(bucket: Hooked) -> None:
    live = {"a": torch.zeros(80), "n": torch.zeros(20, dtype=torch.int32)}
    with left_unfinished(Publisher(live, bucket, gate=Gate(max_changed_share=0.25))) as publisher:
        live["n"] += 1
        live["a"][:5] += 1
        assert publisher.publish(1).quarantined == (), "at the bound"
        live["n"] += 1
        live["a"][:6] += 1
        message = refused(publisher)
    assert "0.26 of the elements changed since version 1, most in tensor 'n' (20); max_changed_share is 0.25" in message


@pytest.mark.parametrize(
    ("dtype", "codec"), [(torch.float32, "plain"), (torch.bfloat16, "tiled"), (torch.float64, "raw")]
)
def test_norm_jump_above_the_bound_is_refused(dtype: torch.dtype, codec: Any, bucket: Hooked) -> None:
    live = {"a": torch.full((300,), 4.0, dtype=dtype), "b": torch.full((100,), -4.0)}
    gate = Gate(max_norm_jump=0.5)
    with left_unfinished(Publisher(live, bucket, codec=codec, gate=gate)) as publisher:
        live["a"][:99] = 8
        assert publisher.publish(1).quarantined == ()
        live["a"][:] = live["a"] * 2
        message = refused(publisher)
        jump = math.sqrt((99 * 64 + 201 * 16) / (99 * 64 + 301 * 16))
        assert f"moved by {jump:.4g} of the norm of version 1, most in tensor 'a'" in message
        assert "max_norm_jump is 0.5" in message


@pytest.mark.parametrize(
    ("before", "passes", "jumps", "said"),
    [
        (torch.zeros(30), -0.0, [1e-9], "inf"),  # where nothing has moved, and where all weights were zero
        (torch.full((30,), 1e200, dtype=torch.float64), 1e200, [2e200], "nan"),  # squares that are too large
        (torch.ones(30), 1.0, [NAN, INF], "inf"),  # where only norms are asked for
    ],
)
def test_odd_norms(before: torch.Tensor, passes: float, jumps: list[float], said: str, bucket: Hooked) -> None:
    live = {"a": before.clone()}
    with Publisher(live, bucket, gate=Gate(nonfinite=False, max_norm_jump=10)) as publisher:
        live["a"][2] = passes
        assert publisher.publish(1).quarantined == ()
        for value in jumps:
            live["a"][1] = value
            assert f"moved by {said}" in refused(publisher)
        live["a"][1] = before[1]
        assert publisher.publish(2, wait=True).quarantined == ()


def test_norms_do_not_drift(bucket: Hooked) -> None:
    live = {"a": torch.ones(500, dtype=torch.float64)}
    with left_unfinished(Publisher(live, bucket, gate=Gate(max_norm_jump=1e30), merge=False)) as publisher:
        for step in range(1, 40):
            live["a"] *= 1e8 if step % 2 else 1e-8
            live["a"][step] += 1e-3
            publisher.publish(step, wait=True)
        live["a"] *= 1e-8
        publisher.publish(40, wait=True)
        publisher.flush()
        norm = float(live["a"].norm())
        live["a"][0] += 1e31 * norm
        assert f"moved by {1e31 * norm / norm:.4g} of the norm of version 40" in refused(publisher)


# What was there before


def test_what_a_base_came_with_is_no_reason(tmp_path: Path, bucket: Hooked, caplog: pytest.LogCaptureFixture) -> None:
    live = {"mask": torch.full((40,), -INF), "w": torch.zeros(40)}
    live["w"][4] = NAN
    base = write_checkpoint(tmp_path / "base", live)
    with Publisher(live, bucket, base=base, gate=Gate()) as publisher:
        assert "version 0 holds elements that are NaN or infinite, 40 in tensor 'mask', 41 in 2 tensors" in caplog.text
        live["w"][5] = 1
        assert publisher.publish(1).quarantined == ()
        live["mask"][3] = INF
        assert "1 in tensor 'mask'" in refused(publisher)
        live["mask"][3] = 0
        assert publisher.publish(2).quarantined == ()


MARK = Gate(action="quarantine")


def test_quarantine_has_its_reasons(bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        trainer.step()
        trainer.live["b"][1, 1] = NAN
        result = publisher.publish(1)
        reasons = ("elements became NaN or infinite: 1 in tensor 'b'; nonfinite is True",)
        assert (result.version, result.quarantined) == (1, reasons)
        assert "version 1 is published as quarantined: elements became NaN" in caplog.text
    assert open_run(bucket.url).head().quarantine == Quarantine(reasons=list(reasons), sound=0)
    assert_holds(bucket, 1, trainer.live)
    assert open_run(bucket.url).verify().replayed


def test_version_whose_outcome_was_unknown_is_noted(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        trainer.live["a"][5] = NAN
        # Written, and the store says that it failed, and does not answer what it holds.
        bucket.after = FailAt("versions/")
        bucket.reading = FailAt("versions/")
        publisher.publish(1)
        with pytest.raises(PublishError):
            publisher.flush()
        trainer.live["b"][0, 0] += 1
        assert publisher.publish(2, wait=True).quarantined
        trainer.live["a"][5] = 1
        assert publisher.publish(3, wait=True).quarantined == ()
    assert marks(bucket) == [0, 0, 0, 3]


# Resume


def test_wider_bounds_or_no_gate_end_quarantine(bucket: Hooked) -> None:
    live = {"a": torch.ones(100)}
    with Publisher(live, bucket, gate=Gate(max_changed_share=0.1, action="quarantine")) as publisher:
        live["a"] += 1
        assert publisher.publish(1).quarantined
        assert publisher.publish(2, wait=True).quarantined
    with Publisher(live, bucket, gate=Gate(max_changed_share=1.0)) as publisher:
        assert publisher.publish(3).quarantined == ()
        live["a"][0] = NAN
    with Publisher(live, bucket) as publisher:
        assert publisher.publish(4).quarantined == ()
    assert marks(bucket) == [0, 0, 0, 3, 4]


def test_resume_where_the_sound_one_is_lost(bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher(trainer.live, bucket, gate=MARK, merge=False) as publisher:
        trainer.live["a"][5] = NAN
        publisher.publish(1)
        publisher.flush()
        publisher.anchor()
    first = open_run(bucket.url).manifest(0)
    damage(bucket.url, first.objects[0].key)
    with Publisher(trainer.live, bucket, gate=MARK) as publisher:
        assert "the sound version before version 1 cannot be rebuilt" in caplog.text
        trainer.live["b"][0, 0] += 1
        assert publisher.publish(2, wait=True).quarantined
        trainer.live["a"][5] = 1
        assert publisher.publish(3, wait=True).quarantined == ()
        publisher.flush()
    assert marks(bucket) == [0, 0, 0, 3]


# Upkeep


@pytest.mark.parametrize(
    ("every", "bad", "anchors", "sound"),
    [
        (1, "..!!!!..", [1, 2, 7, 8], [0, 1, 2, 2, 2, 2, 2, 7, 8]),
        (2, "..!!!!..", [2, 8], [0, 1, 2, 2, 2, 2, 2, 7, 8]),
        (3, ".!!..", [1], [0, 1, 1, 1, 4, 5]),
        (1, "!!", [], [0, 0, 0]),
    ],
)
def test_no_anchor_is_made_of_a_quarantined_version(
    every: int, bad: str, anchors: list[int], sound: list[int], bucket: Hooked, trainer: Trainer
) -> None:
    bucket.upkeep = left_to_the_test
    with Publisher(trainer.live, bucket, gate=MARK, merge=False) as publisher:
        run = open_run(bucket.url)
        for step, mark in enumerate(bad, 1):
            trainer.live["b"][step, step] += 0.5
            trainer.live["a"][5] = NAN if mark == "!" else step
            publisher.publish(step)
            publisher.flush()
            maintain(run, run.head(), anchor_every=every)
    assert run.anchors() == anchors
    assert marks(bucket) == sound


# From version to version: what the gate finds is what a full count finds, whatever happens in between


class Difference(NamedTuple):
    """What one tensor differs in: elements of other bits, those not finite among them, Σ (new − old)² of the finite."""

    changed: int
    nonfinite: int = 0
    distance: float = 0.0


@dataclass
class Published:
    """A version: its tensors, the version it is built on, and whether it is sound."""

    tensors: dict[str, torch.Tensor]
    base: int
    sound: bool


class Model:
    """What the gate has to know, found by looking at everything each time."""

    SHARE, JUMP = 0.5, 0.3

    def __init__(self, live: dict[str, torch.Tensor]) -> None:
        self.live = live
        self.versions = [Published(snapshot(self.live), 0, True)]
        self.held = 0

    @property
    def sound(self) -> int:
        version = self.held
        while not self.versions[version].sound:
            version = self.versions[version].base
        return version

    def reasons(self) -> set[str]:
        old = self.versions[self.sound].tensors
        found = [difference(old[name], new) for name, new in self.live.items()]
        total = sum(tensor.numel() for tensor in self.live.values())
        norm = math.sqrt(sum(squares(tensor) for tensor in old.values()))
        reasons = set()
        if any(item.nonfinite for item in found):
            reasons.add("nonfinite")
        if sum(item.changed for item in found) > self.SHARE * total:
            reasons.add("max_changed_share")
        if math.sqrt(sum(item.distance for item in found)) > self.JUMP * norm:
            reasons.add("max_norm_jump")
        return reasons


def finite(tensor: torch.Tensor) -> torch.Tensor:
    # torch.isfinite knows no 8-bit floats.
    return torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)


def squares(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    return float((tensor.double()[finite(tensor)] ** 2).sum())


def difference(old: torch.Tensor, new: torch.Tensor) -> Difference:
    changed = torch.from_numpy(bits_of(old) != bits_of(new))
    if not new.is_floating_point():
        return Difference(int(changed.sum()))
    both = (finite(old) & finite(new)).view(-1)
    distance = float(((new.double() - old.double()).view(-1)[both] ** 2).sum())
    return Difference(int(changed.sum()), int((changed & ~finite(new).view(-1)).sum()), distance)


STEPS = st.one_of(
    st.tuples(st.sampled_from(["few", "all", "big", "odd", "odd"]), st.sampled_from("abcdef"), st.integers(0, 2**16)),
    st.tuples(st.just("restore"), st.sampled_from("abcdef"), st.booleans()),
    st.tuples(st.just("rebase"), st.integers(0, 30), st.none()),
    st.tuples(st.just("resume"), st.sampled_from(["refuse", "quarantine"]), st.none()),
    st.tuples(st.just("fail"), st.sampled_from(["objects/", "versions/"]), st.none()),
)


@given(st.lists(STEPS, min_size=1, max_size=14), st.sampled_from(["plain", "tiled", "raw"]))
@few_by_default(15)
def test_verdicts_are_those_of_a_full_count(steps: list[tuple[str, Any, Any]], codec: Any) -> None:
    model = Model(odd_tensors())
    names = sorted(model.live)

    def gate(action: Any) -> Gate:
        return Gate(max_changed_share=Model.SHARE, max_norm_jump=Model.JUMP, action=action)

    with tempfile.TemporaryDirectory() as folder:
        bucket, action = Hooked(Path(folder) / "run"), "quarantine"
        publisher = Publisher(model.live, bucket, codec=codec, gate=gate(action), merge=False)
        try:
            # What a rebase or a new publisher has made of it shows at the version after.
            for how, what, value in [*steps, ("few", "a", 1)]:
                if how == "rebase":
                    version = what % len(model.versions)
                    publisher.rebase(version)
                    model.held = version
                elif how == "resume":
                    publisher.close(finish=False)
                    action = what
                    publisher = Publisher(model.live, bucket, codec=codec, gate=gate(action), merge=False)
                    model.held = len(model.versions) - 1
                elif how == "restore":
                    for name in names if value else [what]:
                        model.live[name].copy_(model.versions[model.sound].tensors[name])
                elif how == "fail":
                    bucket.before = FailAt(what)
                else:
                    disturb(model.live[what], value, how)
                if how not in ("rebase", "resume"):
                    publish_as_expected(publisher, model, bucket, action)
        finally:
            publisher.close(finish=False)
        log = list(open_run(bucket.url).log())
        assert [manifest.quarantine is None for manifest in log] == [version.sound for version in model.versions]
        for version, published in enumerate(model.versions):
            assert_holds(bucket, version, published.tensors)


def publish_as_expected(publisher: Publisher, model: Model, bucket: Hooked, action: str) -> None:
    """Publish, and compare what comes of it with what a look at everything says."""
    expected = model.reasons()
    result = publisher.publish(1, wait=True)
    try:
        found = set(result.quarantined)
    except PublishError as error:
        if not isinstance(error, GateError):
            assert "injected" in error.message  # noqa: PT017
            return
        found = set(error.message.partition(": ")[2].split("; ")) | {error.message}
        assert action == "refuse"
    finally:
        bucket.before = lambda key: None
    words = ("nonfinite", "max_changed_share", "max_norm_jump")
    assert {word for word in words if any(word in reason for reason in found)} == expected
    if action == "refuse" and expected:
        return
    model.versions.append(Published(snapshot(model.live), model.held, not expected))
    model.held = len(model.versions) - 1
