"""What publishers do about stores: a write that arrives late, one that may not come too often, one behind a mirror."""

from pathlib import Path

import pytest

from tests.support.architectures import Plain, adamw, train
from tests.support.publishing import assert_holds, snapshot
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket
from vllm_delta_sync.bucket.wrapper import WrappedBucket
from vllm_delta_sync.errors import DigestError, PublishError, UnavailableError
from vllm_delta_sync.wire.manifest import HEAD_KEY


class Late(WrappedBucket):
    """Loses one manifest, which arrives when it is told to."""

    def __init__(self, inner: Bucket) -> None:
        super().__init__(inner)
        self.lose = False
        self.lost: tuple[str, bytes] | None = None

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if self.lose and key.startswith("versions/") and isinstance(data, bytes):
            self.lose, self.lost = False, (key, data)
            raise UnavailableError("no answer")
        super().put(key, data, if_absent=if_absent)

    def arrive(self) -> None:
        assert self.lost is not None
        super().put(*self.lost, if_absent=True)


def test_own_manifest_that_arrives_late_is_gone_on_from(tmp_path: Path) -> None:
    url, model = str(tmp_path / "run"), Plain()
    optimizer = adamw(model)
    names = [name for name in model.state_dict() if name != "head.weight"]
    late = Late(open_bucket(url))
    with Publisher(model, late) as publisher:
        train(model, optimizer)
        publisher.publish(step=1, wait=True)
        publisher.flush()
        late.lose = True
        train(model, optimizer)
        publisher.publish(step=2, wait=True)
        with pytest.raises(PublishError, match="no answer"):
            publisher.flush()
        late.arrive()
        train(model, optimizer)
        publisher.publish(step=3, wait=True)
        with pytest.raises(PublishError, match="earlier try"):
            publisher.flush()
        assert publisher.publish(step=3, wait=True).version == 3
    run = open_run(url)
    assert run.verify().versions == 4
    assert_holds(run, None, snapshot({name: model.state_dict()[name] for name in names}))


class Slow(WrappedBucket):
    """Takes an overwrite a minute, and counts those of HEAD."""

    def __init__(self, inner: Bucket) -> None:
        super().__init__(inner)
        self.overwrite_seconds = 60.0
        self.heads = 0

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self.heads += key == HEAD_KEY
        super().put(key, data, if_absent=if_absent)


def test_head_is_written_no_more_often_than_the_store_takes_it(tmp_path: Path) -> None:
    url, model = str(tmp_path / "run"), Plain()
    optimizer = adamw(model)
    slow = Slow(open_bucket(url))
    with Publisher(model, slow) as publisher:
        for step in range(1, 6):
            train(model, optimizer)
            publisher.publish(step=step, wait=True)
            publisher.flush()
        assert slow.heads == 1
        head, _ = open_run(url).reachable_head()
        assert head.version == 5
    assert slow.heads == 2
    assert open_run(url).head().version == 5


def test_verify_looks_behind_the_mirror(tmp_path: Path) -> None:
    url, mirror = tmp_path / "run", tmp_path / "mirror"
    with Publisher(Plain(), str(url)):
        pass
    (damaged,) = (url / "objects").iterdir()
    (mirror / "objects").mkdir(parents=True)
    (mirror / "objects" / damaged.name).write_bytes(damaged.read_bytes())
    damaged.write_bytes(damaged.read_bytes()[::-1])
    run = open_run(str(url), store=StoreOptions(mirror=str(mirror)))
    assert dict(run.tensors())
    with pytest.raises(DigestError):
        run.verify()
