"""Versions of the real model, and bounds of them: where masters begin, what the cache gives back, thresholds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.codec.bounds import bounds, tally
from benchmarks.common import real_model, real_steps, synthetic
from benchmarks.common.real_training import spread
from benchmarks.common.training_data import changed_share
from tests.support.tiny import make_model, save_checkpoint
from vllm_delta_sync.tensors.torch_views import bits_of

SAMPLES = 20_000


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    """A small model in place of the real one, and an empty cache."""
    folder = save_checkpoint(make_model("qwen3"), tmp_path / "model")
    monkeypatch.setattr(real_model, "checkpoint", lambda: folder)
    monkeypatch.setattr(real_steps, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(real_steps, "MASTERS", tmp_path / "masters")
    return folder


def test_settled_masters_round_to_the_same_bits_and_fill_their_cells() -> None:
    weights = torch.tensor([1.0, 1.0078125, -0.3, 2.0**-9, -2.0, 0.0]).bfloat16()
    upper = (weights.view(torch.int16) + 1).view(torch.bfloat16).float()
    lower = (weights.view(torch.int16) - 1).view(torch.bfloat16).float()
    masters = spread(weights.float().repeat(SAMPLES, 1), torch.Generator().manual_seed(0))
    assert torch.equal(masters.bfloat16().view(torch.int16), weights.view(torch.int16).repeat(SAMPLES, 1))
    assert not masters[:, -1].any()
    for column, value in enumerate(weights.float().tolist()[:-1]):
        ends = sorted((value + float(other[column])) / 2 for other in (lower, upper))
        places = ((masters[:, column].double() - ends[0]) / (ends[1] - ends[0])).numpy()
        # Powers of two too, whose cells reach only half as far down as up.
        assert np.allclose(np.quantile(places, (0.1, 0.25, 0.5, 0.75, 0.9)), (0.1, 0.25, 0.5, 0.75, 0.9), atol=0.02)
        assert 0 < places.min() < 0.001
        assert 0.999 < places.max() < 1


def test_versions_come_back_from_the_cache_and_lead_from_the_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [fresh], [settled] = (real_steps.pairs(kind, (1e-5,)) for kind in ("fresh", "settled"))
    tensors = load_file(checkpoint / "model.safetensors")
    start = {name: bits_of(tensor).reshape(tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert list(fresh.old) == sorted(start)
    for pair in (fresh, settled):
        assert pair.share == changed_share(pair.old, pair.new) > 0
        assert changed_share(pair.before, pair.old) > 0
        assert {name: bits.shape for name, bits in pair.old.items()} == {name: start[name].shape for name in pair.old}
        assert 0 < changed_share(start, pair.before) < 0.9  # not one tensor's changes in another
    assert changed_share(fresh.new, settled.new) > 0
    monkeypatch.setattr(real_steps, "train", None)
    [again] = real_steps.pairs("settled", (1e-5,))
    assert changed_share(again.new, settled.new) == 0


def test_a_sequence_goes_on_where_the_settled_pair_ends(checkpoint: Path) -> None:
    [pair] = real_steps.pairs("settled", (real_steps.SEQUENCE_RATE,))
    versions = real_steps.sequence(3)
    assert changed_share(versions.base, pair.old) == 0
    first, _, _ = versions.versions()
    assert changed_share(first, pair.new) == 0


def test_trained_weights_come_from_the_example(checkpoint: Path) -> None:
    assert not real_steps.is_there("trained")
    with pytest.raises(SystemExit, match="run make example-real first"):
        real_steps.pairs("trained")
    model = make_model("qwen3").float()
    model.save_pretrained(real_steps.MASTERS)
    assert real_steps.is_there("trained")
    [pair] = real_steps.pairs("trained", (1e-5,))
    assert pair.share > 0


def test_bounds_with_thresholds_lie_between_nothing_known_and_the_old_exponent() -> None:
    [pair] = synthetic.pairs(synthetic.transformer_shapes(layers=1, hidden=128, inner=256, vocabulary=256), (0.01,))
    found = bounds(tally(pair))
    limits = [found.position, *(one.position for one in found.thresholds), found.position_given_exponent]
    assert limits == sorted(limits, reverse=True)
    assert len(set(limits)) == len(limits)
    assert [len(one.powers) for one in found.thresholds] == [1, 2, 3]
    assert found.value > found.value_given_exponent
    # The best single threshold is worse a power of two above and below it.
    old = np.concatenate([bits.reshape(-1) for bits in pair.old.values()])
    new = np.concatenate([bits.reshape(-1) for bits in pair.new.values()])
    magnitudes = np.abs((old.astype(np.uint32) << 16).view(np.float32))

    def entropy(power: int) -> float:
        total = 0.0
        for side in (magnitudes < 2.0**power, magnitudes >= 2.0**power):
            share = np.count_nonzero(old[side] != new[side]) / np.count_nonzero(side)
            total -= np.count_nonzero(side) * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
        return total / np.count_nonzero(old != new) / 8

    [best] = found.thresholds[0].powers
    assert entropy(best) == pytest.approx(found.thresholds[0].position)
    assert min(entropy(best - 1), entropy(best + 1)) > entropy(best)
