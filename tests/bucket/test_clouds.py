"""What gs:// and az:// say of a bucket or credentials that are wrong. A run through each: tests/e2e/test_stores.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.bucket.contract.conftest import reachable
from tests.support import google_store
from tests.support.stores import Store
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import AccessError, NotFoundError, StoreError


@pytest.fixture(params=["gs", "az"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(scheme: str, tmp_path: Path) -> Iterator[Store]:
    with reachable(scheme, tmp_path) as found:
        yield found


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
