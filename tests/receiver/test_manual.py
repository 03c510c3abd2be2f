"""Policy ``manual``: the trainer's say moves a server, and nothing else does; but it looks, and shows what waits."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.receiver.test_service import WAIT, Site, wait_until
from tests.support.world import World
from vllm_delta_sync.errors import NotFoundError


@pytest.fixture(params=[True], ids=["with a base"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A run with a base; without one if the test says so."""
    site = Site(World(tmp_path, with_base=request.param))
    yield site
    site.end()


def test_nothing_moves_by_itself_and_lag_says_what_waits(site: Site) -> None:
    service = site.serve(policy="manual")
    service.start()
    wait_until(lambda: service.receiver.served_version == 0)
    before = site.world.bits()
    for version in (1, 2, 3):
        site.world.train(version)
        wait_until(lambda version=version: service.receiver.status()["lag"] == version)  # type: ignore[misc]
    looks = service.receiver.status()["looks"]
    wait_until(lambda: service.receiver.status()["looks"] > looks + 3)
    status = service.receiver.status()
    assert (status["served"]["version"], status["state"], status["last_error"]) == (0, "idle", None)
    assert "commit" not in site.port.log
    site.world.expect_bits(before)
    for asked, lag in ((2, 1), (None, 0)):
        status = service.request("sync", asked).result(WAIT)
        assert (status["served"]["version"], status["lag"]) == (3 - lag, lag)
    site.world.expect_exact()


def test_version_that_is_not_published_changes_nothing(site: Site) -> None:
    service = site.serve(policy="manual")
    service.start()
    with pytest.raises(NotFoundError, match="version 4 is not published"):
        service.request("sync", 4).result(WAIT)
    wait_until(lambda: service.receiver.served_version == 0)
    assert service.receiver.status()["last_error"] is None


@pytest.mark.parametrize("site", [False], indirect=True, ids=["without a base"])
def test_weights_that_are_no_version_are_compared_once(site: Site) -> None:
    """Each comparison reads the whole model."""
    site.world.model.norm.data[:] = 0
    proofs: list[str] = []
    compared = threading.Event()

    def count(method: str, arguments: dict[str, object]) -> None:
        if method == "start" and arguments["operation"] == "prove":
            proofs.append(method)
            compared.set()

    site.port.before = count
    service = site.serve(policy="manual")
    service.start()
    assert compared.wait(WAIT)
    looks = service.receiver.status()["looks"]
    wait_until(lambda: service.receiver.status()["looks"] > looks + 5)
    assert (len(proofs), service.receiver.served_version) == (1, None)
    assert service.request("sync").result(WAIT)["served"]["version"] == 0
    site.world.expect_exact()


def test_damage_shows_before_anybody_asks(site: Site, tmp_path: Path) -> None:
    service = site.serve(policy="manual")
    service.start()
    wait_until(lambda: service.receiver.served_version == 0)
    hidden = (tmp_path / "run" / "run.json").rename(tmp_path / "hidden")
    wait_until(lambda: service.receiver.status()["last_error"] is not None)
    assert service.receiver.served_version == 0
    hidden.rename(tmp_path / "run" / "run.json")
    wait_until(lambda: service.receiver.status()["last_error"] is None)
