"""The folders that trainers write: steps are read from known names only, and weights are found where trainers put them.

The layouts are those that the trainers' code and documents describe.
"""

import os
from pathlib import Path

import pytest

from tests.support.checkpoints import weights, write_checkpoint
from trainer_side.checkpoint_layouts import find_checkpoints, locate, named_step, step_of
from vllm_delta_sync.errors import NotFoundError, UsageError


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-100", 100), ("checkpoint_100", 100), ("ckpt-7", 7),
        ("step_10", 10), ("step-10", 10), ("step_000010", 10), ("checkpoint-step-10", 10),
        ("global_step_10", 10), ("global_step10", 10), ("global_steps_10", 10), ("global_step100_hf", 100),
        ("iter_0000020", 20), ("iteration_20", 20), ("epoch_0", 0), ("epoch-3", 3),
        ("epoch_0_step_20", 20), ("epoch1epochstep9globalstep109", 109), ("checkpoint-100-merged", 100),
        ("Qwen3-0.6B-v2025", None), ("2025", None), ("v0-20250101", None), ("llama-3-step-8b", None),
        ("checkpoint-100-old", None), ("checkpoint", None), ("final", None), ("my-checkpoint-7", None),
        ("checkpoint-99999999999999999999", None),
    ],
)  # fmt: skip
def test_steps_in_names(name: str, step: int | None) -> None:
    assert named_step(name) == step


@pytest.mark.parametrize(
    ("name", "state", "step"),
    [
        ("checkpoint-100", b'{"global_step": 7}', 100),
        ("last", b'{"global_step": 7}', 7),
        ("last-2025", b'{"global_step": 7}', 7),
        ("last", b'{"global_step": 7, "log_history": [{"grad_norm": NaN}]}', 7),
        ("last", b'{"global_step": "7"}', None),
        ("last", b'{"global_', None),
        ("last-2025", None, None),
        ("global_step_10/actor/huggingface", None, 10),
        ("step_1/a/b/c/d/e", None, None),
    ],
)
def test_the_step_of_a_folder(tmp_path: Path, name: str, state: bytes | None, step: int | None) -> None:
    folder = write_checkpoint(tmp_path / name, weights(0))
    if state is not None:
        (folder / "trainer_state.json").write_bytes(state)
    assert step_of(folder) == step
    (tmp_path / "newest").symlink_to(folder)
    assert step_of(tmp_path / "newest") == step


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


# Name → folder of the weights below the watched one, name and step that are found, files beside it
LAYOUTS: dict[str, tuple[str, str, int, str]] = {
    "transformers": (
        "checkpoint-100", "checkpoint-100", 100,
        "checkpoint-100/optimizer.pt checkpoint-100/rng_state.pth training_args.bin",
    ),
    "ms-swift": ("v0-20250101-101010/checkpoint-100", "checkpoint-100", 100, "v0-20250101-101010/args.json"),
    "verl": (
        "global_step_10/actor/huggingface", "global_step_10", 10,
        "latest_checkpointed_iteration.txt global_step_10/data.pt global_step_10/actor/model_world_size_2_rank_0.pt "
        "global_step_10/actor/optim_world_size_2_rank_0.pt global_step_10/critic/huggingface/model.safetensors",
    ),
    "OpenRLHF": ("checkpoints_ppo/global_step100_hf", "global_step100_hf", 100, "checkpoints_ppo/_actor/latest"),
    "NeMo-RL": (
        "step_10/policy/weights/model/consolidated", "step_10", 10,
        "step_10/policy/weights/model/shard-00001-model-00001-of-00001.safetensors step_10/training_info.json "
        "step_10/policy/optimizer/optim/__0_0.distcp step_10/policy/tokenizer/tokenizer.json "
        "step_10/value/weights/model/consolidated/model.safetensors",
    ),
    "NeMo AutoModel": (
        "epoch_0_step_20/model/consolidated", "epoch_0_step_20", 20,
        "epoch_0_step_20/optim/__0_0.distcp epoch_0_step_20/rng/rng_dp_rank_0.pt",
    ),
    "SkyRL": ("global_step_5/policy", "global_step_5", 5, "global_step_5/critic/model.safetensors"),
    "prime-rl": ("weights/step_10", "step_10", 10, "weights/step_10/STABLE"),
    "torchtitan": ("checkpoint/step-500", "step-500", 500, ""),
    "AReaL": ("checkpoints/me/a/trial0/default/epoch0epochstep9globalstep9", "epoch0epochstep9globalstep9", 9, ""),
    "torchtune": ("epoch_1", "epoch_1", 1, "epoch_1/recipe_state.pt"),
}  # fmt: skip


@pytest.mark.parametrize("trainer", LAYOUTS)
def test_layouts_of_trainers(trainer: str, tmp_path: Path) -> None:
    below, name, step, beside = LAYOUTS[trainer]
    write_checkpoint(tmp_path / below, weights(0), sharded=True)
    touch(tmp_path, *beside.split())
    (tmp_path / "LATEST").symlink_to((tmp_path / below).relative_to(tmp_path).parts[0])
    (found,) = find_checkpoints(tmp_path)
    assert (Path(found.name).name, found.step, found.path, found.reason) == (name, step, tmp_path / below, "")
    step_folder = tmp_path / found.name
    assert locate(step_folder) == tmp_path / below
    assert step_of(locate(step_folder)) == step


# Files below the watched folder, the folder that is named, and the beginning of the reason
UNREADABLE: list[tuple[str, str, str]] = [
    ("checkpoint-5/pytorch_model.bin checkpoint-5/training_args.bin", "checkpoint-5", "pytorch_model.bin is not"),
    (
        "global_step_10/actor/model_world_size_2_rank_0.pt global_step_10/actor/huggingface/config.json "
        "global_step_10/critic/model_world_size_2_rank_0.pt",
        "global_step_10", "actor/model_world_size_2_rank_0.pt is not",
    ),
    ("global_step_10/actor/dist_ckpt/__0_0.distcp", "global_step_10", "actor/dist_ckpt/__0_0.distcp is not"),
    (
        "_actor/latest _actor/global_step100/mp_rank_00_model_states.pt",
        "_actor/global_step100", "mp_rank_00_model_states.pt is not",
    ),
    ("checkpoint-5/adapter_model.safetensors", "checkpoint-5", "adapter_model.safetensors is not"),
    ("step_3/model-00001-of-00002.safetensors", "step_3", "model-00001-of-00002.safetensors is not"),
    ("step_3/config.json step_3/states/data.pt", "step_3", "it holds no weights"),
    ("_critic/global_step100/mp_rank_00_model_states.pt", "_critic", "by its name it holds another model"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "name", "reason"), UNREADABLE)
def test_what_cannot_be_published_is_named_with_its_reason(files: str, name: str, reason: str, tmp_path: Path) -> None:
    touch(tmp_path, *files.split())
    (found,) = find_checkpoints(tmp_path)
    assert found.name == name
    assert found.reason.startswith(reason)
    if name != "_critic":
        with pytest.raises(NotFoundError, match="only safetensors can be read") as refused:
            locate(tmp_path / name.partition("/")[0])
        assert reason.rpartition("/")[2] in refused.value.message or reason == "it holds no weights"


def test_folders_without_weights_are_no_checkpoints(tmp_path: Path) -> None:
    touch(tmp_path, "runs/events.out", "wandb/run/config.json", "training_args.bin", "optimizer/step_5/x.distcp")
    touch(tmp_path, "tmp_step_4/policy/model.safetensors", ".cache/step_4/model.safetensors")
    touch(tmp_path, "tmp/step_4/model.safetensors", "tmpa1b2c3/model.safetensors")
    assert find_checkpoints(tmp_path) == []


def test_two_checkpoints_of_one_step(tmp_path: Path) -> None:
    for name in ("policy", "ema"):
        write_checkpoint(tmp_path / "step_5" / name, weights(0))
    (found,) = find_checkpoints(tmp_path)
    assert found.reason == "it holds 2 checkpoints (step_5/ema, step_5/policy); publish one with --from"
    with pytest.raises(UsageError, match=r"holds 2 checkpoints \(ema, policy\); give one of them"):
        locate(tmp_path / "step_5")
    assert step_of(locate(tmp_path / "step_5" / "policy")) == 5


def test_the_watched_folder_may_hold_a_checkpoint_itself(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, weights(0))
    write_checkpoint(tmp_path / "checkpoint-5", weights(5))
    here, below = find_checkpoints(tmp_path)
    assert (here.name, "--from" in here.reason) == (".", True)
    assert (below.name, below.reason) == ("checkpoint-5", "")


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "checkpoint-5").mkdir(parents=True)
    (outside / "checkpoint-5" / "back").symlink_to(outside)
    write_checkpoint(outside / "checkpoint-6", weights(6))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(outside)
    names = [found.name for found in find_checkpoints(tmp_path / "out")]
    assert names == ["link/checkpoint-5", "link/checkpoint-6"]


def test_links_that_cannot_be_followed_hide_nothing(tmp_path: Path) -> None:
    """Only one to weights is reported."""
    for name in ("step_1", "runs/step_2"):
        write_checkpoint(tmp_path / name, weights(1))
    (tmp_path / "step_3").mkdir()
    for folder, name in (
        (".", "latest"), ("runs", "latest"), ("step_1", "merges.txt"), ("step_3", "model.safetensors")
    ):  # fmt: skip
        (tmp_path / folder / name).symlink_to(name)  # leads to itself
    found = {each.name: each.reason for each in find_checkpoints(tmp_path)}
    assert found.keys() == {"step_1", "runs/step_2", "step_3"}
    assert [found["step_1"], found["runs/step_2"]] == ["", ""]
    assert "cannot be read: Too many levels of symbolic links" in found["step_3"]


def test_files_that_are_deleted_while_a_folder_is_searched_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "step_1", weights(1))
    scandir = os.scandir

    def delete_after(path: Path) -> list[os.DirEntry[str]]:
        entries = [*scandir(path)]
        (path / "log.tmp").unlink()
        return entries

    touch(tmp_path, "log.tmp", "step_1/log.tmp")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", delete_after)
        found = find_checkpoints(tmp_path)
    assert [(each.name, each.reason) for each in found] == [("step_1", "")]
