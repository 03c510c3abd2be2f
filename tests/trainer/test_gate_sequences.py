"""What the gate finds from version to version is what a full count finds, whatever happens in between."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.publishers import FailAt, Hooked, assert_holds
from trainer_side import Gate, Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import GateError, PublishError
from vllm_delta_sync.tensors.torch_views import bits_of

NAN, INF = math.nan, math.inf


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
        self.versions = [Published(self.copy(), 0, True)]
        self.held = 0

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.live.items()}

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


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {
        "a": torch.randn(60, generator=generator).bfloat16(),
        "b": torch.randn(6, 10, generator=generator),
        "c": torch.randn(40, generator=generator).half(),
        "d": torch.arange(30),
        "e": torch.randn(20, generator=generator).to(torch.float8_e4m3fn),
        "f": torch.randn(10, generator=generator).double(),
    }
    made["b"][0, 0] = NAN
    return made


def disturb(live: dict[str, torch.Tensor], name: str, seed: int, how: str) -> None:
    """Change some elements of a tensor."""
    flat, generator = live[name].view(-1), torch.Generator().manual_seed(seed)
    many = flat.numel() if how == "all" else 1 + seed % 4
    chosen = torch.randperm(flat.numel(), generator=generator)[:many]
    if not flat.is_floating_point():
        flat[chosen] += 1
        return
    values = flat[chosen].float()
    noise = torch.randn(many, generator=generator)
    made = {"few": values + 0.01 * noise, "all": values + 0.05 * noise, "big": 30 * noise}.get(how)
    made = torch.full((many,), NAN if seed % 2 else INF) if made is None else made
    flat[chosen] = made.to(flat.dtype)


STEPS = st.one_of(
    st.tuples(st.sampled_from(["few", "all", "big", "bad", "bad"]), st.sampled_from("abcdef"), st.integers(0, 2**16)),
    st.tuples(st.just("restore"), st.sampled_from("abcdef"), st.booleans()),
    st.tuples(st.just("rebase"), st.integers(0, 30), st.none()),
    st.tuples(st.just("resume"), st.sampled_from(["refuse", "quarantine"]), st.none()),
    st.tuples(st.just("fail"), st.sampled_from(["objects/", "versions/"]), st.none()),
)


@given(st.lists(STEPS, min_size=1, max_size=14), st.sampled_from(["plain", "tiled", "raw"]))
def test_verdicts_are_those_of_a_full_count(steps: list[tuple[str, Any, Any]], codec: Any) -> None:
    model = Model(tensors())
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
                    disturb(model.live, what, value, how)
                if how not in ("rebase", "resume"):
                    publish(publisher, model, bucket, action)
        finally:
            publisher.close(finish=False)
        log = list(open_run(bucket.url).log())
        assert [manifest.quarantine is None for manifest in log] == [version.sound for version in model.versions]
        for version, published in enumerate(model.versions):
            assert_holds(bucket, version, published.tensors)


def publish(publisher: Publisher, model: Model, bucket: Hooked, action: str) -> None:
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
    model.versions.append(Published(model.copy(), model.held, not expected))
    model.held = len(model.versions) - 1
