"""Gates and budgets of ranks that publish together are those of one process that publishes the gathered model."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from tests.support.checkpoints import write_checkpoint
from tests.support.publishers import Hooked, nothing
from tests.support.publishing import Tensors, damage
from tests.trainer.sharded.models import WAYS, assert_same_runs, built, gathered, reference, steps
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Budget, Gate, Publisher
from trainer_side.model.module import live_tensors
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import DeltaSyncError, GateError, NotFoundError, StoreError
from vllm_delta_sync.format.manifest import HeldBack
from vllm_delta_sync.tensors.torch_views import bits_of

NAN, INF = math.nan, math.inf
SLOW = pytest.mark.slow
Outcome = dict[str, Any]


def outcome_of(publisher: Publisher, step: int, exact: bool) -> Outcome:
    """What a publisher says of a version, once it is durable or refused."""
    result = publisher.publish(step, wait=True, exact=exact)
    try:
        held = result.held_back
    except GateError as error:
        return {"refused": error.message}
    found = None if held is None else held.model_dump()
    return {"version": result.version, "quarantined": list(result.quarantined), "held back": found}


class Both:
    """A model that ranks publish together; rank 0 also publishes it whole, to another run.

    Attributes:
        history: of each version, what is said here and, on rank 0, what the process that publishes alone says.
    """

    def __init__(self, rank: int, size: int, url: str, case: str, dtype: str = "float32", **given: Any) -> None:
        way, _, name = case.partition(": ")
        made = [built(name).to(getattr(torch, dtype)) for _ in range(2)]
        self.rank, self.url, self.given = rank, url, given
        self.model = WAYS[way](made[0], size)
        self.whole = made[1]
        self.history: list[list[Outcome | None]] = []
        self.open()

    def open(self) -> None:
        """Begin both runs, or take them over."""
        self.publisher = Publisher(self.model, self.url, merge=False, **self.given)
        self.alone = Publisher(self.whole, f"{self.url}-alone", merge=False, **self.given) if self.rank == 0 else None
        self.publishers = [self.publisher, *([] if self.alone is None else [self.alone])]

    def publish(self, exact: bool = False) -> Outcome:
        """Publish both; what is said here."""
        step, state = len(self.history) + 1, gathered(self.model)
        mine, theirs = outcome_of(self.publisher, step, exact), None
        if self.alone is not None:
            self.whole.load_state_dict(state)
            theirs = outcome_of(self.alone, step, exact)
        self.history.append([mine, theirs])
        return mine

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()

    def rebase(self, version: int) -> None:
        for publisher in self.publishers:
            publisher.rebase(version)

    def part(self, name: str) -> torch.Tensor:
        """Flat view of this rank's part of a parameter."""
        return self.part_of(self.model, name)

    @staticmethod
    def part_of(model: nn.Module, name: str) -> torch.Tensor:
        parameter = dict(getattr(model, "module", model).named_parameters())[name]
        return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().view(-1)

    def scale(self, factor: float, only: str = "") -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if only in name:
                    parameter.mul_(factor)


def assert_same(url: str, said: Sequence[list[list[Outcome | None]]], since: int = 0) -> None:
    """All ranks said the same as the process that publishes alone, and both runs are the same."""
    for rank, history in enumerate(said):
        assert [mine for mine, _ in history] == [theirs for _, theirs in said[0]], rank
    together, alone = assert_same_runs(url, f"{url}-alone", since), open_run(f"{url}-alone")
    for ours, theirs in zip(together.log(), alone.log(), strict=True):
        assert ours.changed == theirs.changed or ours.held_back is None


# Gates


def gates(rank: int, size: int, url: str, case: str, action: Any, odd: str, copies: list[int]) -> Any:
    """A gate meets elements that are not finite in one rank's part, too many changes, and a jump.

    ``copies``: the ranks that hold these elements.
    """
    both = Both(rank, size, url, case, gate=Gate(max_changed_share=0.6, max_norm_jump=0.2, action=action))
    part = both.part(odd)
    before = part[:2].clone()

    def put(values: torch.Tensor) -> None:
        if rank in copies:
            part[:2] = values

    both.scale(1.01, "embed")
    assert both.publish()["version"] == 1
    put(torch.tensor([NAN, INF]))
    both.publish()
    # Judged again, with what was added.
    both.scale(2)
    both.publish()
    both.scale(0.5)
    put(before)
    both.scale(1.01, "embed")
    assert both.publish().get("quarantined") == [], "the next sound version makes up for it"
    both.scale(8, "embed")
    both.publish()
    if action == "quarantine":
        both.rebase(1)
        assert both.publish()["quarantined"], "the weights are as far from the sound version as before"
        # The next publishers find the sound version in the bucket.
        both.close()
        both.open()
        put(torch.tensor([NAN, INF]))
        assert len(both.publish()["quarantined"]) == 2
        put(before)
    else:
        assert both.publish().keys() == {"refused"}
    both.scale(1 / 8, "embed")
    assert both.publish().get("quarantined") == []
    put(torch.tensor([NAN, INF]))
    both.publish()
    for publisher in both.publishers:
        with pytest.raises(GateError, match="became NaN") if action == "refuse" else nullcontext():
            publisher.close()
    return both.history


@pytest.mark.parametrize(
    ("size", "case", "action", "odd", "copies"),
    [
        (2, "fsdp: qwen3 moe", "refuse", "model.layers.1.mlp.experts.down_proj", [1]),
        (2, "fsdp: llama tied", "quarantine", "model.embed_tokens.weight", [1]),
        (4, "hybrid: qwen3 moe", "quarantine", "model.layers.0.mlp.experts.down_proj", [1, 3]),
        pytest.param(4, "columns: qwen3 moe", "quarantine", "model.layers.0.mlp.gate.weight", [1], marks=SLOW),
        pytest.param(4, "ddp: qwen3 tied", "refuse", "model.norm.weight", [0, 1, 2, 3], marks=SLOW),
    ],
)
def test_gate_judges_as_for_one_process(
    size: int, case: str, action: str, odd: str, copies: list[int], nursery: Nursery, tmp_path: Path
) -> None:
    url = str(tmp_path / "run")
    said = nursery.run(size, gates, url=url, case=case, action=action, odd=odd, copies=copies)
    assert_same(url, said)
    for text in ("became NaN or infinite: 2 in tensor", "max_changed_share is 0.6", "max_norm_jump is 0.2"):
        assert text in str(said[0])


def lost_version(rank: int, size: int, url: str, action: Any) -> list[Any]:
    """The newest version is lost, and the weights of one rank, which would replace it, are bad."""
    both = Both(rank, size, url, "fsdp: llama tied", anchor_every=100)
    both.scale(1.01)
    both.publish()
    both.close()
    distributed.barrier()
    if rank == 0:
        for where in (url, f"{url}-alone"):
            damage(where, open_run(where).head().objects[0].key)
    if rank == 1:
        both.part("model.embed_tokens.weight")[0] = NAN
    state = gathered(both.model)
    both.whole.load_state_dict(state)
    distributed.barrier()
    both.given["gate"] = Gate(action=action)
    if action == "refuse":
        said = []
        for model, where in ((both.model, url), (both.whole, f"{url}-alone")):
            if rank == 0 or model is both.model:
                with pytest.raises(GateError) as caught:
                    Publisher(model, where, merge=False, **both.given)
                said.append(caught.value.message)
        return said
    both.open()
    both.scale(1.01)
    assert both.publish()["quarantined"]
    if rank == 1:
        both.part("model.embed_tokens.weight")[0] = 1
    assert both.publish()["quarantined"] == []
    both.close()
    return both.history


def test_lost_version_is_not_replaced_by_bad_weights(nursery: Nursery, tmp_path: Path) -> None:
    refused = nursery.run(2, lost_version, url=str(tmp_path / "refused"), action="refuse")
    assert [open_run(str(tmp_path / name)).head().version for name in ("refused", "refused-alone")] == [1, 1]
    message = refused[0][1]
    assert "elements are NaN or infinite: 1 in tensor 'model.embed_tokens.weight'" in message
    assert [said[0] for said in refused] == [message, f"rank 0: {message}"]
    url = str(tmp_path / "run")
    assert_same(url, nursery.run(2, lost_version, url=url, action="quarantine"), since=2)
    assert open_run(url).manifest(2).sound == 1


def sound_version_that_one_rank_cannot_read(rank: int, size: int, folder: str) -> list[str]:
    """Rank 1 fails to read what the newest version is compared with: at first the store fails, then it says not found.

    Returns what quarantines the next version, on each rank.
    """
    bucket, model = Hooked(Path(folder)), WAYS["fsdp"](built("llama tied"), size)
    gate = Gate(max_changed_share=0.01, action="quarantine")
    part = Both.part_of(model, "model.embed_tokens.weight")
    publisher = Publisher(model, bucket, gate=gate, merge=False)
    part *= 2
    assert publisher.publish(1, wait=True).quarantined
    publisher.close()
    objects = {ref.key for ref in open_run(folder).manifest(0).objects}

    def take_over(failure: DeltaSyncError) -> Publisher:
        reads: list[str] = []

        def second(key: str) -> None:
            reads.append(key)
            if rank == 1 and key in objects and reads.count(key) == 2:
                raise failure

        bucket.reading = second
        return Publisher(model, bucket, gate=gate, merge=False)

    with pytest.raises(StoreError, match="injected" if rank == 1 else "rank 1: injected"):
        take_over(StoreError("injected"))
    publisher = take_over(NotFoundError("injected"))
    bucket.reading = nothing
    part *= 2
    found = list(publisher.publish(2, wait=True).quarantined)
    publisher.close()
    return found


def test_ranks_compare_with_one_version(nursery: Nursery, tmp_path: Path) -> None:
    said = nursery.run(2, sound_version_that_one_rank_cannot_read, folder=str(tmp_path / "run"))
    assert said[0] == said[1]
    assert "of the elements changed since the version before, most" in said[0][0]


# Budgets


def check_baseline(both: Both) -> None:
    """What this rank compares with next is what receivers have restored, bit for bit."""
    weights, run = both.publisher._committer._weights, open_run(both.url)
    held = run.snapshot(both.publisher.version, base=both.given.get("base")).bits
    for part, (tensor, box) in enumerate(weights.places):
        assert np.array_equal(weights.baseline.read(part), box.view(held[tensor]).reshape(-1))


def budgets(rank: int, size: int, url: str, case: str, dtype: str, bounds: dict[str, Any], base: str | None) -> Any:
    """Training with a budget; then the weights stay, until nothing is held back; then training ends."""
    both = Both(rank, size, url, case, dtype, base=base, budget=Budget(**bounds))
    for number in range(4):
        steps(both.model, rank, 1)
        held = both.publish(exact=number == 2)["held back"]
        assert (held is None) == (number == 2)
        check_baseline(both)
    left = [held["elements"]]
    while left[-1]:
        held = both.publish()["held back"]
        left.append(0 if held is None else held["elements"])
        assert left[-1] < left[-2]
    check_baseline(both)
    both.rebase(1)
    steps(both.model, rank, 1)
    both.publish()
    check_baseline(both)
    # Another publisher goes on from what is held back.
    for publisher in both.publishers:
        publisher.close(finish=False)
    both.open()
    both.publish()
    check_baseline(both)
    both.close()
    return both.history


@pytest.mark.parametrize(
    ("size", "case", "dtype", "bounds", "is_tied"),
    [
        # Of changes in bfloat16 many have one size, so that places decide.
        (2, "fsdp: qwen3 moe", "bfloat16", {"max_share": 0.3}, False),
        (2, "fsdp: llama tied", "float32", {"max_share": 0.4, "min_change": 1e-3, "exact_every": 5}, True),
        pytest.param(4, "hybrid: qwen3 tied", "bfloat16", {"max_share": 0.4}, False, marks=SLOW),
        pytest.param(4, "columns: qwen3 moe", "bfloat16", {"max_share": 0.3}, False, marks=SLOW),
        pytest.param(4, "fsdp tp: qwen3", "float32", {"max_share": 0.3}, False, marks=SLOW),
        pytest.param(4, "ddp: qwen3 tied", "float32", {"max_share": 0.3}, False, marks=SLOW),
    ],
)
def test_budget_sends_what_one_process_would(
    size: int, case: str, dtype: str, bounds: dict[str, Any], is_tied: bool, nursery: Nursery, tmp_path: Path
) -> None:
    url, base = str(tmp_path / "run"), None
    if is_tied:
        # The base has both of two tensors that are one in the model.
        tensors = {name: tensor.detach().clone() for name, tensor in live_tensors(built("llama tied")).read()}
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        base = write_checkpoint(tmp_path / "base", tensors)
    given = {"case": case, "dtype": dtype, "bounds": bounds, "base": None if base is None else str(base)}
    said = nursery.run(size, budgets, url=url, **given)
    assert_same(url, said)
    log = list(open_run(url).log())
    assert log[-1].held_back is None
    sent = [manifest.changed for manifest in log if manifest.held_back is not None]
    assert sent
    assert max(sent) <= bounds["max_share"] * log[0].total
    if is_tied:
        for version in range(len(log)):
            held = dict(open_run(url).tensors(version))
            assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])


def large_on_one_rank(rank: int, size: int, url: str) -> list[Any]:
    """Only one rank sends something, nearly all of two experts, which are whole there; the others hold all back."""
    both = Both(rank, size, url, "fsdp: qwen3 moe", codec="raw", budget=Budget(min_change=0.5))
    if rank == 0:
        both.part("model.layers.0.mlp.experts.down_proj")[1:] *= 2
    else:
        both.part("model.embed_tokens.weight").mul_(1.001)
    assert both.publish()["held back"]
    check_baseline(both)
    both.close()
    return both.history


def test_nothing_is_sent_in_full_while_any_rank_holds_back(nursery: Nursery, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    assert_same(url, nursery.run(4, large_on_one_rank, url=url))
    assert open_run(url).manifest(1).changed == 2 * 32 * 16 - 1


def check(before: Tensors, now: Tensors, wanted: Tensors, held: HeldBack | None) -> None:
    """What was sent and what is said to be held back are together all that has changed."""
    elements, distance, norm = 0, 0.0, 0.0
    for name, tensor in now.items():
        trained = wanted[name].to(tensor.dtype)
        stays, goes = (bits_of(tensor) == bits_of(of) for of in (before[name], trained))
        assert (stays | goes).all(), "an element is either as before or as it is now"
        elements += int((~goes).sum())
        distance += float((trained.double() - tensor.double()).square().sum())
        norm += float(tensor.double().square().sum())
    assert (0 if held is None else held.elements) == elements
    assert held is None or held.relative_norm == pytest.approx(math.sqrt(distance / norm), rel=1e-4)


def bytes_bounded(rank: int, size: int, url: str, most: int) -> list[Any]:
    """Each version has at most so many bytes; what it does not send is held back, and goes later."""
    model = WAYS["fsdp"](built("qwen3 moe").bfloat16(), size)
    found: list[Any] = []

    def publish(step: int, exact: bool = False) -> None:
        before = dict(open_run(url).tensors()) if rank == 0 else {}
        result = publisher.publish(step, wait=True, exact=exact)
        wanted, held = reference("qwen3 moe", model), result.held_back
        found.append([result.payload_bytes, 0 if held is None else held.elements])
        if rank == 0:
            check(before, dict(open_run(url).tensors(result.version)), wanted, held)

    with Publisher(model, url, budget=Budget(max_bytes=most), merge=False) as publisher:
        for step in range(3):
            steps(model, rank, 1)
            publish(step)
        while found[-1][1]:
            publish(4)
        steps(model, rank, 1)
        publish(5)
        publish(6, exact=True)
    return found


def test_all_ranks_together_keep_to_the_bytes(nursery: Nursery, tmp_path: Path) -> None:
    url, most = str(tmp_path / "run"), 16_000
    said = nursery.run(2, bytes_bounded, url=url, most=most)
    assert said == [said[0]] * 2
    *bounded, last = said[0]
    assert last[0] > most
    assert last[1] == 0
    assert all(size <= most for size, _ in bounded)
    assert max(size for size, _ in bounded) > 0.75 * most, "the budget is used"
    held = [elements for _, elements in bounded[2:-1]]
    assert held == sorted(held, reverse=True)
    assert held[-1] == 0
    run = open_run(url)
    assert {ref.rank for ref in run.manifest(1).objects} == {0, 1}
    assert run.verify().replayed
