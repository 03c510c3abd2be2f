"""A run of another format version is refused by everyone with one error, and nothing is written to it."""

from pathlib import Path

import pytest
import torch

from tests.support.world import World
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.cli.main import run
from vllm_delta_sync.errors import UnsupportedError
from vllm_delta_sync.format.limits import FORMAT_VERSION

OTHERS = pytest.mark.parametrize(
    ("version", "fix"),
    [(FORMAT_VERSION - 1, "use the release that wrote the run"), (FORMAT_VERSION + 1, "upgrade to read it")],
    ids=["earlier", "later"],
)


def contents(url: str) -> dict[str, bytes]:
    with open_bucket(url) as bucket:
        return {info.key: bucket.get(info.key) for info in bucket.list()}


def give_format(url: str, version: int) -> dict[str, bytes]:
    """Make a run one of another format, as its first bytes say; return what the bucket has then."""
    with open_bucket(url) as bucket:
        for key in (info.key for info in list(bucket.list()) if info.key.endswith(".json")):
            ours, other = (f'"format_version":{number}'.encode() for number in (FORMAT_VERSION, version))
            bucket.put(key, bucket.get(key).replace(ours, other))
    return contents(url)


@OTHERS
def test_a_publisher_and_the_commands_refuse_it(
    version: int, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, weights = str(tmp_path / "run"), {"weight": torch.zeros(64, dtype=torch.bfloat16)}
    with Publisher(weights, url) as publisher:
        weights["weight"][3] = 1.0
        publisher.publish(step=1, wait=True)
    before = give_format(url, version)
    with pytest.raises(UnsupportedError, match=rf"format_version is {version}, .*{fix}"):
        Publisher(weights, url)
    with pytest.raises(UnsupportedError, match=fix):
        open_run(url)
    for command in (["log"], ["verify"], ["gc", "--keep-last", "1"], ["compact"], ["tag", "set", "best"]):
        assert run([*command, "--bucket", url]) != 0
        assert fix in capsys.readouterr().err.replace("\n", " ")
    assert contents(url) == before


@OTHERS
@pytest.mark.parametrize("starts", [False, True], ids=["serving", "starting"])
def test_a_server_that_meets_it_keeps_what_it_has(version: int, fix: str, starts: bool, tmp_path: Path) -> None:
    world = World(tmp_path)
    if not starts:
        world.train_and_follow(1)
    held = world.bits()
    world.train(2)
    before = give_format(world.url, version)
    if starts:
        world.follow()
    with pytest.raises(UnsupportedError, match=fix):
        world.receiver.advance()
    world.expect_bits(held)
    assert world.receiver.served_version == (None if starts else 1)
    assert contents(world.url) == before
