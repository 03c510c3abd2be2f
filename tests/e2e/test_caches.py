"""No answer comes from what older weights have computed: images, and keys and values that a KV connector keeps."""

import base64
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.caches import CACHED, PROMPT_OF_IMAGES, SHORT
from tests.e2e.servers import beside, delta_sync_serve, serving
from tests.e2e.warm import see

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("offline"), pytest.mark.slow]
COMMITS, DOCUMENTS = 8, 64


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with three versions of a model that sees, and what was answered."""
    root = tmp_path_factory.mktemp("images")
    return root, see("tests.e2e.caches", root, "images")


def test_an_image_is_answered_from_the_version_served(images: tuple[Path, dict[str, Any]]) -> None:
    seen = images[1]
    fresh = seen["fresh"]
    assert seen["v0"] == fresh[0]
    for before, setting in enumerate(("reset", "salt")):
        assert seen[f"{setting}, status"] == [before + 1, True]
        assert seen[f"{setting}, before"] == fresh[before]
        assert seen[f"{setting}, after"] == fresh[before + 1]
        assert seen[f"{setting}, back"] == fresh[before]
    assert fresh[0] != fresh[1] != fresh[2], "the versions do not differ enough to tell"


@pytest.mark.parametrize("setting", ["reset", "salt"])
def test_a_server_answers_an_image_from_the_version_served(setting: str, images: tuple[Path, dict[str, Any]]) -> None:
    root, seen = images
    picture = base64.b64encode((root / "picture.png").read_bytes()).decode()
    content = [
        {"type": "text", "text": PROMPT_OF_IMAGES},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]
    body = {"messages": [{"role": "user", "content": content}], "add_special_tokens": True, "temperature": 0}
    body |= {"max_tokens": SHORT, "logprobs": True, "ignore_eos": True, "return_token_ids": True}
    flags = ["--policy", "manual", "--prefix-cache", setting, "--chat-template", "{{ messages[0]['content'] }}"]
    command = delta_sync_serve(root / "v0", "--bucket", str(root / "run"), *flags)
    environment = {"DELTA_SYNC_STATE_DIR": str(root / f"state-{setting}")}
    with serving(root / f"{setting}.log", command, environment) as server:
        for version in (0, 1, 2, 1):
            moved = server.post("/delta_sync/sync", {"version": version})
            assert moved.json()["served"]["version"] == version, moved.text
            for _ in range(2):
                answer = server.post("/v1/chat/completions", body).json()
                [choice] = answer["choices"]
                assert [span["version"] for span in answer["delta_sync"]["spans"]] == [version]
                assert choice["token_ids"] == seen["fresh"][version]["tokens"]
                assert [each["logprob"] for each in choice["logprobs"]["content"]] == seen["fresh"][version]["logprobs"]


def test_commits_between_a_query_and_its_documents_end_nothing(images: tuple[Path, dict[str, Any]]) -> None:
    """With what the model made of images, vLLM would drop what it made of the query, and could not go on."""
    root, _ = images
    flags = ["--policy", "manual", "--runner", "pooling", "--pooler-config", '{"task": "token_embed"}']
    command = delta_sync_serve(root / "v0", "--bucket", str(root / "run"), *flags)
    body = {"model": "tiny", "text_1": "the quick", "text_2": ["lazy dog jumps over the fox " * 20] * DOCUMENTS}
    environment = {"DELTA_SYNC_STATE_DIR": str(root / "state-scores")}
    codes: list[int] = []

    def score(ended: threading.Event) -> None:
        while not ended.is_set():
            codes.append(server.post("/score", body).status_code)

    with serving(root / "scores.log", command, environment) as server:
        with beside(score, score, score) as threads:
            for commit in range(COMMITS):
                moved = server.post("/delta_sync/sync", {"version": (commit + 1) % 2})
                assert moved.status_code == 200, moved.text
            assert all(thread.is_alive() for thread in threads), "a request failed"
        assert set(codes) == {200}
        assert server.post("/delta_sync/verify").json()["verdict"] is True


@pytest.mark.parametrize("setting", ["salt", "reset"])
def test_a_connector_gives_back_only_what_the_version_served_has_computed(
    setting: str, connector: dict[str, Any]
) -> None:
    seen, (old, new) = connector[setting], connector["fresh"]
    assert old["tokens"] != new["tokens"], "the versions do not differ enough to tell"
    assert seen["first"] == old
    assert seen["after"] == new
    assert seen["back"] == old
    # It is used all the same.
    for again, right in (("again", old), ("after again", new)):
        assert seen[again] == {**right, "cached": CACHED}


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return see("tests.e2e.caches", tmp_path_factory.mktemp("connector"), "connector")


@pytest.mark.parametrize("plugins", ["", "delta_sync_too"])
def test_an_engine_without_our_plugin_is_refused(tmp_path: Path, plugins: str) -> None:
    """Caches inside the engine core could not be dropped, and a lost pause would not end."""
    seen = see("tests.e2e.caches", tmp_path, "unplugged", environment={"VLLM_PLUGINS": plugins})
    assert seen["said"].startswith("EngineError: the engine core was started without our plugin")
    assert "name delta_sync in VLLM_PLUGINS, or unset it" in seen["said"]
    assert len(seen["answer"]["tokens"]) == SHORT


def test_images_asked_for_during_a_drain_are_answered(tmp_path: Path) -> None:
    """vLLM's front end and engine each remember which images the engine has, and must go on to agree."""
    seen = see("tests.e2e.caches", tmp_path, "draining")
    assert seen["served"] == 1
    for once, again in zip(seen["meanwhile"], seen["again"], strict=True):
        assert len(once["tokens"]) == SHORT
        assert again["tokens"] == once["tokens"]
