"""Object stores for unit tests: no credentials of this machine's own, and no way to any cloud."""

import os
from pathlib import Path

import pytest

from tests.support.answers import closed_port
from vllm_delta_sync.bucket.obstore_bucket import ObjectStoreBucket
from vllm_delta_sync.settings import StoreOptions
from vllm_delta_sync.urls import parse_store_url

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
ANYBODY = {
    "AWS_SKIP_SIGNATURE": "true",
    # GOOGLE_SKIP_SIGNATURE goes for reading only: for writing obstore looks for credentials all the same.
    "GOOGLE_BEARER_TOKEN": "token",
    "AZURE_SKIP_SIGNATURE": "true",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
}
_NOBODY = f"127.0.0.1:{closed_port()}"
NOWHERE = {
    **dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"), f"http://{_NOBODY}"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost,::1"),
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_METADATA_ENDPOINT": f"http://{_NOBODY}",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{_NOBODY}",
    "GCE_METADATA_HOST": _NOBODY,
    "AZURE_MSI_ENDPOINT": f"http://{_NOBODY}/metadata/identity/oauth2/token",
}
"""Environment in which whatever a test forgets asks nobody outside of loopback, 169.254.169.254 included, where a
cloud's machines get credentials: everything else goes by a proxy that is not there. Other addresses for that one are
not enough: if nobody answers at GCE_METADATA_HOST, obstore goes on to the real one."""


def far_from_clouds(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Take everything out of the environment that stores' clients heed, but for what keeps them on this machine."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            patch.delenv(name)
    for name, value in {"HOME": str(home), **NOWHERE}.items():
        patch.setenv(name, value)


def opened(url: str, endpoint: str | None = None, deadline: float = 60.0) -> ObjectStoreBucket:
    return ObjectStoreBucket(parse_store_url(url), StoreOptions(store_endpoint=endpoint, store_deadline=deadline))
