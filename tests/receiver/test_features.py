"""Which options are refused at start-up, on the configurations that vLLM itself makes of its flags."""

import json
from pathlib import Path

import pytest

from tests.e2e import warm
from tests.support.tiny import make_model, save_checkpoint
from vllm_delta_sync.engine.compat import features
from vllm_delta_sync.engine.entrypoints import serve_command
from vllm_delta_sync.errors import DeltaSyncError, EngineError, UsageError


@pytest.mark.xdist_group("engines")
def test_options_are_followed_or_refused_by_name(tmp_path: Path) -> None:
    base = str(save_checkpoint(make_model("llama"), tmp_path / "base"))
    draft = str(save_checkpoint(make_model("llama", seed=3), tmp_path / "draft"))
    link = tmp_path / "link"
    link.symlink_to(base)

    def drafts(method: str, **rest: object) -> dict[str, object]:
        return {"speculative_config": {"method": method, "num_speculative_tokens": 2, **rest}}

    cases: list[tuple[dict[str, object], str]] = [
        ({}, ""),
        ({"load_format": "safetensors"}, ""),
        ({"enable_lora": True}, ""),
        ({"kv_cache_dtype": "fp8"}, ""),
        ({"quantization": "fp8"}, "--quantization is 'fp8"),
        ({"quantization": "fp8_per_block"}, "--quantization is 'fp8_per_block'"),
        (drafts("ngram", prompt_lookup_max=2), ""),
        (drafts("draft_model", model=draft), ""),
        (drafts("draft_model", model=str(link)), ""),
        (drafts("eagle", model=draft), ""),
        (drafts("eagle", model=draft, parallel_drafting=True), "--speculative-config has parallel_drafting"),
        (drafts("custom_class", model="tests.drafts.Proposer"), "--speculative-config has method 'custom_class'"),
        ({"load_format": "dummy"}, "--load-format is 'dummy'"),
        ({"load_format": "ipc_cache"}, "--load-format is 'ipc_cache'"),
        ({"cpu_offload_gb": 1.5}, "--cpu-offload-gb is 1.5"),
        ({"offload_group_size": 2}, "--offload-group-size is 2"),
        ({"pause_mode": "abort"}, ""),
        ({"runner": "pooling"}, "pause_mode becomes wait"),
        ({"runner": "pooling", "pause_mode": "wait"}, ""),
        ({"runner": "pooling", "pause_mode": "abort"}, "pause_mode is 'abort'"),
    ]
    asked = json.dumps([options for options, _ in cases])
    done = warm.run("tests.receiver.asked_options", base, asked, seconds=600, environment={"VLLM_PLUGINS": ""})
    line = next(line for line in done.said.splitlines() if line.startswith("ANSWERS "))
    answers, in_run = json.loads(line.removeprefix("ANSWERS "))
    for (options, words), answer in zip(cases, answers, strict=True):
        assert words in answer if words else answer == "", options
    # What --load-format delta_sync takes from the run by its names: the served model, and a draft with the same folder.
    for (options, _), (served, *drafts_in_run) in zip(cases, in_run, strict=True):
        speculative = options.get("speculative_config")
        assert served, options
        if isinstance(speculative, dict) and "model" in speculative:
            assert set(drafts_in_run) == {speculative["model"] != draft}, options


def test_rust_front_end_is_refused_and_no_other() -> None:
    for value in ("1", "2", " 1"):
        with pytest.raises(EngineError, match="unset it"):
            features.check_front_end({features.RUST_FRONT_END: value})
    for environment in ({}, {features.RUST_FRONT_END: "0"}, {features.RUST_FRONT_END: ""}):
        features.check_front_end(environment)


@pytest.mark.parametrize(
    ("environment", "flags", "kind", "words"),
    [
        ({features.RUST_FRONT_END: "1"}, [], EngineError, "VLLM_USE_RUST_FRONTEND is '1'"),
        ({}, ["--grpc"], UsageError, "--grpc starts a server that loads no plugins"),
        ({}, ["--worker-extension-cls", "own.Class"], UsageError, "--worker-extension-cls is set by delta-sync serve"),
        # vLLM takes underscores too, and the last of two flags.
        ({}, ["--worker_extension_cls=own.Class"], UsageError, "--worker-extension-cls is set by delta-sync serve"),
    ],
)
def test_serve_refuses_flags_under_which_nothing_would_follow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    flags: list[str],
    kind: type[DeltaSyncError],
    words: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind, match=words):
        serve_command.serve_command("model", {"bucket": str(tmp_path)}, flags)
