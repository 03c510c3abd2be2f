"""The same run through each store: real clients, a trainer and a ``vllm serve`` that meet only there.

What a server makes of a run in a directory is in tests/e2e/test_server.py; here a directory has no server.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Load, Server, delta_sync_serve, serving
from tests.e2e.trainer import Trainer
from tests.support.stores import STORES, Store, hub
from tests.support.tiny import make_model, save_checkpoint
from vllm_delta_sync import open_run
from vllm_delta_sync.tensors.torch_views import bits_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VERSIONS = 20
FAMILY = "qwen3"
SHARD_BYTES = {"local": 2**30, "s3": 10_000, "gs": 2**30, "az": 2**30, "hub": 2**30}
"""In S3 each delta is parted into objects."""
LOADED = 1
"""Versions that come while the server answers."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Two would wait for each other on the core where the server computes."""
DEADLINE = {"DELTA_SYNC_STORE_DEADLINE": "8"}


@dataclass
class Site:
    """A store, a trainer that publishes there, and a server that follows, if there is one."""

    store: Store
    trainer: Trainer
    server: Server | None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model(FAMILY, seed=5), tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def served() -> dict[str, dict[str, Any]]:
    """Per store, what was held at the end: the server's digests, and the fingerprint."""
    return {}


@contextmanager
def opened(name: str, base: Path, folder: Path, serves: bool = True) -> Iterator[Site]:
    """A site. Its server polls fast, and keeps what it fetches in a cache of its own."""
    with ExitStack() as stack:
        store = stack.enter_context(STORES[name](folder / "store"))
        environment = {**store.environment, **(DEADLINE if name == "hub" else {})}
        # The trainer has the usual deadline: while a busy server takes both cores, an answer may take seconds.
        options = {"bucket": store.url, "base": str(base), "shard_bytes": SHARD_BYTES[name]}
        trainer = Trainer(FAMILY, folder / "trainer.log", store.environment | ONE_THREAD, **options)
        stack.callback(trainer.close)
        server = None
        if serves:
            flags = ["--bucket", store.url, "--poll-seconds", "0.3", "--cache-dir", str(folder / "cache")]
            command, environment = delta_sync_serve(base, *flags), environment | {"VLLM_SERVER_DEV_MODE": "1"}
            server = stack.enter_context(serving(folder / "server.log", command, environment, cold=name == "hub"))
            server.wait_served(0)
        yield Site(store, trainer, server)


def through(site: Site) -> dict[str, Any]:
    """Publish all versions; what is held then."""
    for version in range(1, VERSIONS + 1):
        load = None if site.server is None or version > LOADED else Load(site.server)
        with load or nullcontext():
            assert site.trainer.step()["version"] == version
            if site.server is not None:
                status = site.server.wait_served(version)
        if load is not None:
            load.check()
    if site.server is None:
        return {"fingerprint": open_run(site.store.url).manifest(VERSIONS).fingerprint}
    assert status["served"]["fingerprint"] == status["head"]["fingerprint"]
    assert site.server.post("/delta_sync/verify").json()["verdict"] is True
    return {"digests": site.server.digests(), "fingerprint": status["served"]["fingerprint"]}


def check_run(name: str, store: Store) -> dict[str, str]:
    """SHA-256 of every tensor of the last version, as whoever reads the run gets it."""
    run = open_run(store.url)
    assert run.verify().versions == VERSIONS + 1
    objects = [run.manifest(version).objects for version in range(1, VERSIONS + 1)]
    assert (min(map(len, objects)) > 1) is (name == "s3")
    return {tensor: sha256(bits_of(weights).tobytes()).hexdigest() for tensor, weights in run.tensors(VERSIONS)}


@pytest.fixture(scope="module")
def at_hub(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with opened("hub", base, tmp_path_factory.mktemp("hub")) as site:
        yield site


@pytest.mark.parametrize("name", SHARD_BYTES)
def test_a_run_is_the_same_through_every_store(
    name: str,
    base: Path,
    tmp_path: Path,
    served: dict[str, dict[str, Any]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = nullcontext(request.getfixturevalue("at_hub")) if name == "hub" else None
    with shared or opened(name, base, tmp_path, name != "local") as site:
        for variable, value in site.store.environment.items():
            monkeypatch.setenv(variable, value)
        served[name] = through(site)
        served[name]["weights"] = check_run(name, site.store)
    first = next(iter(served.values()))
    assert all(found["weights"] == first["weights"] for found in served.values())
    assert len({found["fingerprint"] for found in served.values()}) == 1
    digests = [found["digests"] for found in served.values() if "digests" in found]
    assert all(found == digests[0] for found in digests)


PASSING: dict[str, dict[str, Any]] = {
    "503": {"kind": "status", "code": 503, "times": 4},
    "429": {"kind": "status", "code": 429, "times": 4},
    "dropped": {"kind": "drop", "times": 4},
    "answers lost": {"kind": "lose", "times": 2},
    "cut": {"kind": "cut", "times": 3},
    "stalled": {"kind": "stall", "seconds": 10, "times": 1},
    "flipped": {"kind": "flip", "path": "/cdn/", "times": 1},
}
"""What passes by itself: publisher and server get over it without a word to anybody."""


def test_a_hub_with_faults(at_hub: Site) -> None:
    """Publisher and server share one Hub that fails in every way; the server answers all the while."""
    server, trainer = at_hub.server, at_hub.trainer
    assert server is not None
    answers = server.outputs()
    for name, fault in PASSING.items():
        hub().fault(**fault)
        status = server.wait_served(trainer.step()["version"])
        assert status["served"]["fingerprint"] == status["head"]["fingerprint"], name
        before, answers = answers, server.outputs()
        assert answers != before, name
        hub().clear_faults()
    before = server.status()["served"]
    for kind, broken in (("access", refusing), ("deadline", hanging)):
        with broken():
            assert server.wait_error(kind)["served"] == before
            assert server.outputs() == answers
    server.wait_served(trainer.step()["version"])
    status = server.status()
    assert status["last_error"] is None
    assert status["store"]["retries"] > 0
    assert server.post("/delta_sync/verify").json()["verdict"] is True


@contextmanager
def refusing() -> Iterator[None]:
    """The token is taken back, and given again."""
    before = hub().options()["token"]
    hub().change(token="another")
    try:
        yield
    finally:
        hub().change(token=before)


@contextmanager
def hanging() -> Iterator[None]:
    hub().fault("drop", times=None)
    try:
        yield
    finally:
        hub().clear_faults()
