"""A run through gs:// and az://, and what each says of a bucket or credentials that are wrong."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.bucket.contract.conftest import reachable
from tests.support import google_store
from tests.support.stores import Store
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import AccessError, NotFoundError, StoreError
from vllm_delta_sync.tensors.torch_views import bits_of


@pytest.fixture(params=["gs", "az"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(scheme: str, tmp_path: Path) -> Iterator[Store]:
    with reachable(scheme, tmp_path) as found:
        yield found


def test_run_is_published_and_restored_bit_for_bit(store: Store) -> None:
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    with Publisher(model, bucket=store.url) as publisher, torch.no_grad():
        for step in range(1, 4):
            model.weight[step] += 1
            publisher.publish(step=step, wait=True)
    run = open_run(store.url)
    held = dict(run.tensors(version=3))
    assert sorted(held) == ["bias", "weight"]
    for name, tensor in model.state_dict().items():
        assert bits_of(held[name]).tobytes() == bits_of(tensor).tobytes()
    assert not run.verify().findings


@pytest.mark.usefixtures("store")
def test_missing_bucket_is_named(scheme: str) -> None:
    name = {"gs": "bucket", "az": "container"}[scheme]
    with open_bucket(f"{scheme}://nowhere/run") as bucket:
        with pytest.raises(NotFoundError, match="does not exist; check the bucket URL") as absent:
            bucket.get("a")
        with pytest.raises(StoreError, match=f"there is no such {name}: create it") as refused:
            bucket.put("a", b"")
    assert "\n" not in str(absent.value) + str(refused.value)


def test_wrong_credentials_are_refused_with_the_role_and_are_not_shown(
    scheme: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "d3JvbmctYWNjb3VudC1rZXk"
    if scheme == "az":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", f"{wrong}=")
        role = "Storage Blob Data Contributor"
    else:
        endpoint, stranger = store.environment["GOOGLE_BASE_URL"], rsa.generate_private_key(65537, 2048)
        for name, value in google_store.environment(endpoint, tmp_path, stranger).items():
            monkeypatch.setenv(name, value)
        role, wrong = "Storage Object Admin", "PRIVATE KEY"
    with open_bucket(store.url) as bucket, pytest.raises(AccessError, match=role) as refused:
        bucket.get("a")
    assert "\n" not in str(refused.value)
    assert wrong not in str(refused.value)
