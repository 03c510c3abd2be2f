"""What an operator gets wrong, or what fails around a server: one line that names it, now and then; and it heals alone.

Receivers, services and stores are the real ones. tests/README.md lists the tests of other causes.
"""

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clouds import far_from_clouds
from tests.support.modules import FusedModel, ModulePort, checkpoint_tensors, save_base
from tests.support.proxy import TcpProxy
from tests.support.services import WAIT, serving, wait_until
from tests.support.stores import s3_server
from tests.support.world import World, expect_equal
from trainer_side import Publisher
from vllm_delta_sync.bucket import obstore_clients
from vllm_delta_sync.engine.follow import service as service_module
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.engine.worker import worker_extension
from vllm_delta_sync.errors import SettingsError
from vllm_delta_sync.settings import load_settings

POLL = 0.02
LOGGERS = ("vllm.delta_sync", "vllm_delta_sync.bucket")


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of ours that an operator sees, tracebacks included."""
    return [
        record.getMessage() + ("" if record.exc_info is None else "\nTraceback")
        for record in caplog.records
        if record.name in LOGGERS and record.levelno >= logging.WARNING
    ]


def base_model() -> FusedModel:
    model = FusedModel()
    model.load_weights((name, tensor.bfloat16()) for name, tensor in checkpoint_tensors().items())
    return model


Serve = Callable[..., ReceiverService]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a service for a model; all are ended."""
    with ExitStack() as services:

        def start(model: torch.nn.Module, url: str, folder: str = "", **settings: Any) -> ReceiverService:
            port = ModulePort(model)
            port.ranks[0].folder = folder
            return services.enter_context(serving(port, bucket=url, **{"poll_seconds": POLL, **settings}))

        yield start


def error_of(service: ReceiverService) -> dict[str, str]:
    error: dict[str, str] | None = service.receiver.status()["last_error"]
    return error or {"kind": "", "message": ""}


@pytest.fixture
def at_s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    far_from_clouds(monkeypatch, tmp_path)
    for name, value in s3_server().environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s4://bucket/run", "unknown scheme 's4'; supported: a path, file:///"),
        ("s3:/bucket/run", "is a path that begins like s3://; write s3://"),
        ("S3//bucket/run", "is a path that begins like s3://"),
        # As from `docker run --env-file`, which keeps quotes, and from a manifest, in which nothing is replaced.
        ('"s3://bucket/run"', "begins with '\"', which only a shell replaces or removes"),
        ("'/data/run'", "for a folder of that name"),
        ("$BUCKET/run", "begins with '$'"),
        ("~/run", "begins with '~'"),
        (" /data/run", "begins with ' '"),
        ("s3://", "names no bucket: write s3://bucket/run"),
        ("file://run", "no absolute path"),
        ("s3://me:secret@bucket/run", "has a user"),
    ],
)
def test_url_that_can_be_none_is_refused_before_anything_starts(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match=r"setting 'bucket': bucket URL") as caught:
        load_settings({"bucket": url}, {})
    assert words in caught.value.message
    assert "secret" not in caught.value.message
    for good in ("./s3:/run", "./~/run", "runs/one", "/a:b/run", "my-s3:run"):
        assert load_settings({"bucket": good}, {}).bucket == good


def test_peer_without_a_token_ends_a_server_at_its_start(tmp_path: Path) -> None:
    settings = load_settings({"bucket": str(tmp_path / "run"), "peer": "http://127.0.0.1:9"}, {})
    with pytest.raises(SettingsError, match="setting 'peer' needs the run's token"):
        ReceiverService(ModulePort(FusedModel()), settings)


@pytest.mark.usefixtures("at_s3")
def test_bucket_that_is_not_there_and_then_has_no_run(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "s3://unit-operator-late/run"
    service = serve(base_model(), url)
    wait_until(lambda: service.receiver.board.polls > 5)
    error = error_of(service)
    assert error["kind"] == "not_found"
    assert f"no run at '{url}': there is no such bucket or folder; start a publisher there" in error["message"]
    assert warned(caplog) == [f"not_found: {error['message']}"]
    s3_server().create_bucket("unit-operator-late")
    wait_until(lambda: "it has no run.json; start a publisher there, or check the URL" in error_of(service)["message"])
    wait_until(lambda: len(warned(caplog)) == 2)
    World(tmp_path, url=url)
    wait_until(lambda: service.receiver.served_version == 0)
    wait_until(lambda: service.receiver.status()["last_error"] is None)
    # A look may come when the run is begun, and not all of it there yet.
    assert len([line for line in warned(caplog) if not line.startswith("not_found: no object ")]) == 2


def test_run_that_is_taken_away_and_put_back(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    world = World(tmp_path)
    service = serve(base_model(), str(run))
    wait_until(lambda: service.receiver.served_version == 0)
    run.rename(tmp_path / "away")
    wait_until(lambda: error_of(service)["kind"] == "not_found")
    looks = service.receiver.board.polls
    wait_until(lambda: service.receiver.board.polls > looks + 2)
    # A poll in the middle of which the run was moved names the object that it missed, or finds no version.
    missed = ("not_found: no object 'versions/", "not_found: no version is published")
    (said,) = (line for line in warned(caplog) if not line.startswith(missed))
    assert re.search(r"run \w{32} is no longer at 'file://.*': its run.json is missing; restore it", said)
    assert service.receiver.served_version == 0
    (tmp_path / "away").rename(run)
    world.train(1)
    wait_until(lambda: service.receiver.served_version == 1)
    wait_until(lambda: service.receiver.status()["last_error"] is None)


def begin_other(root: Path, tensors: dict[str, torch.Tensor], base: bool = True) -> None:
    """Publish a run of another model."""
    folder = save_base(root / "other", tensors) if base else None
    Publisher(lambda: tensors.items(), str(root / "run"), folder).close()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("begin", "kind", "names"),
    [
        (
            lambda root: begin_other(root, {"model.layers.0.mlp.weight": torch.zeros(8, 8)}),
            "model",
            ["loads none of the 1 tensors", "model.layers.0.mlp.weight", "setting bucket"],
        ),
        (
            lambda root: begin_other(root, checkpoint_tensors(seed=1)),
            "chain",
            ["6 of 6 tensors differ", "Restart vLLM from the checkpoint", "/other"],
        ),
        (
            lambda root: begin_other(root, checkpoint_tensors(), base=False),
            "model",
            ["is F32", "has it as BF16", "start vLLM from the checkpoint"],
        ),
    ],
    ids=["architecture", "checkpoint", "dtype"],
)
def test_run_of_another_model_is_refused_once_and_another_run_in_its_place_heals(
    begin: Callable[[Path], None],
    kind: str,
    names: list[str],
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin(tmp_path)
    save_base(tmp_path / "base", checkpoint_tensors())
    model = base_model()
    service = serve(model, str(tmp_path / "run"), str(tmp_path / "base"))
    wait_until(lambda: service.receiver.status()["state"] == "refused")
    wait_until(lambda: warned(caplog))
    # It is looked at again and again; nothing more is to be said.
    looks, is_replaced = [0], History.is_replaced

    def counted(history: History) -> bool:
        looks[0] += 1
        return is_replaced(history)

    monkeypatch.setattr(History, "is_replaced", counted)
    wait_until(lambda: looks[0] > 5)
    error = error_of(service)
    assert error["kind"] == kind
    for name in names:
        assert name in error["message"], error
    assert warned(caplog) == [f"{kind}: {error['message']}"]
    expect_equal(model, base_model())
    (tmp_path / "run").rename(tmp_path / "wrong")
    World(tmp_path, url=str(tmp_path / "right")).close()
    # It is looked at before its first version is there.
    (tmp_path / "right" / "versions").rename(tmp_path / "versions")
    wrong = service.receiver.run_id
    (tmp_path / "right").rename(tmp_path / "run")
    wait_until(lambda: service.receiver.run_id != wrong and error_of(service)["kind"] != kind)
    (tmp_path / "versions").rename(tmp_path / "run" / "versions")
    wait_until(lambda: service.receiver.served_version == 0)
    wait_until(lambda: service.receiver.status()["last_error"] is None)


def test_worker_without_a_controller_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    contacted = threading.Event()
    monkeypatch.setattr(worker_extension, "contacted", contacted)
    monkeypatch.setattr(worker_extension, "CONTACT_SECONDS", POLL)
    worker_extension.watch_for_controller()
    wait_until(lambda: len(warned(caplog)) >= 2)
    contacted.set()
    (line,) = set(warned(caplog))
    for name in ("no controller has contacted it", "VLLM_PLUGINS", "DELTA_SYNC_BUCKET", "delta-sync serve", "attach("):
        assert name in line


@pytest.mark.usefixtures("at_s3")
def test_store_that_is_gone_for_long_fills_no_log_and_is_back_at_once(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = s3_server()
    url = f"{server.create_bucket('unit-operator-gone')}/run"
    world = World(tmp_path, url=url, notice="tcp://127.0.0.1:*")
    with TcpProxy(server.port) as network:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")
        service = serve(base_model(), url, store_deadline=0.3, notice=world.publisher.notice_address)
        wait_until(lambda: service.receiver.served_version == 0)
        caplog.clear()
        network.cut()
        looks = service.receiver.board.polls
        # Each of them tries for a while, and says so.
        wait_until(lambda: service.receiver.board.polls >= looks + 5)
        assert error_of(service)["kind"] == "deadline"
        assert url in error_of(service)["message"]
        retries = service.receiver.status()["store"]["retries"]
        assert retries >= 3
        # One line of the receiver, and of what tries again one after 0, 1, 3, 7, 15 … seconds.
        assert 1 <= len(warned(caplog)) <= 8, warned(caplog)
        waits = threading.Event()

        def delay(self: Any) -> float:
            """Longer than this test lasts: it is the notice that wakes it."""
            waits.set()
            return 10.0 * WAIT

        monkeypatch.setattr(service_module.ReceiverService, "_delay", delay)
        assert waits.wait(WAIT)
        network.resume()
        for step in itertools.count(1):
            if service.receiver.served_version != 0:
                break
            world.train(step)
            time.sleep(0.2)
        wait_until(lambda: service.receiver.status()["last_error"] is None)


def test_unforeseen_error_has_one_traceback_and_is_outlived(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    World(tmp_path)
    trouble, tried = [True], [0]
    is_replaced = History.is_replaced

    def failing(history: Any) -> bool:
        tried[0] += 1
        if trouble:
            raise ZeroDivisionError(f"at {time.monotonic()}")
        return is_replaced(history)

    monkeypatch.setattr(History, "is_replaced", failing)
    service = serve(base_model(), str(tmp_path / "run"))
    wait_until(lambda: tried[0] > 3)
    assert error_of(service)["message"].startswith("unexpected ZeroDivisionError: at ")
    assert len(warned(caplog)) == 1
    trouble.clear()
    wait_until(lambda: service.receiver.served_version == 0)


@pytest.mark.usefixtures("at_s3")
def test_renewed_credentials_in_a_file_are_taken_up(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = s3_server()
    url = f"{server.create_bucket('unit-operator-keys')}/run"
    World(tmp_path, url=url).close()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr(obstore_clients, "RENEW_SECONDS", 0.1)
    file.write_text("[default]\naws_access_key_id=ended\naws_secret_access_key=ended\n")
    service = serve(base_model(), url)
    wait_until(lambda: service.receiver.board.polls > 2 and error_of(service)["kind"] == "access")
    assert len(warned(caplog)) == 1
    keys = f"aws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n"
    file.write_text(f"[default]\n{keys}")
    wait_until(lambda: service.receiver.served_version == 0)
    assert server.secret_key not in caplog.text


@pytest.mark.parametrize("days", [1, -1])
def test_clock_that_jumps_stops_nothing(
    days: int, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    service = serve(base_model(), str(tmp_path / "run"))
    wait_until(lambda: service.receiver.served_version == 0)
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 86400 * days)
        world.train(1)
        wait_until(lambda: service.receiver.served_version == 1)
        assert 0 <= service.receiver.status()["polled_seconds"] < WAIT
    world.train(2)
    wait_until(lambda: service.receiver.served_version == 2)
