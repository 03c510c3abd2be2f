"""``AccessChecks``, the doctor's first checks: is the URL valid, the library installed, and access granted?"""

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket, scheme_of
from vllm_delta_sync.bucket.factory import parse_store_url
from vllm_delta_sync.bucket.local import STAGING
from vllm_delta_sync.doctor.findings import CheckResult, Failure
from vllm_delta_sync.doctor.store_checks import PREFIX
from vllm_delta_sync.errors import NotFoundError, StoreError, UsageError
from vllm_delta_sync.format.manifest import RUN_KEY

LIBRARIES = {
    "hf": ("huggingface_hub", "hf_xet"),
    **dict.fromkeys(("s3", "gs", "az", "memory"), ("obstore",)),
}
LEAST = {"huggingface_hub": (1, 33), "obstore": (0, 12)}
INSTALL = "pip install 'vllm-delta-sync[stores]'"
VARIABLES = {
    "hf": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_CLIENT_ID",
        "AZURE_FEDERATED_TOKEN_FILE",
    ),
}
"""Variables that a store's client takes credentials from, by precedence; files and machine roles follow."""
FILES = {"s3": ".aws/credentials", "gs": ".config/gcloud/application_default_credentials.json"}
"""Credential files in the home directory."""


class AccessChecks:
    """Checks of the access to a bucket.

    Attributes:
        bucket: set by ``url`` if the bucket can be opened. is_directory: whether it is a local directory.
    """

    def __init__(self, url: str, options: StoreOptions, reads_only: bool) -> None:
        self._url = url
        self._options = options
        self._reads_only = reads_only
        self._scheme = scheme_of(url)
        self._root = Path()
        self._folders: list[Path] = []
        self.bucket: Bucket | None = None

    @property
    def is_directory(self) -> bool:
        return self._scheme == "file"

    def url(self) -> CheckResult:
        """Check whether the URL is valid; warn about a directory that does not exist yet."""
        if all(_version(name) is not None for name in LIBRARIES.get(self._scheme, ())):
            self.bucket = open_bucket(self._url, self._options)
        else:
            parse_store_url(self._url)
        figures: dict[str, Any] = {"url": self.bucket.url if self.bucket else self._url, "scheme": self._scheme}
        if self.bucket is None or not self.is_directory:
            return CheckResult("url", "ok", figures["url"], figures)
        self._root = root = Path(unquote(urlsplit(self.bucket.url).path))
        self._folders = [root / PREFIX.rstrip("/")]
        figures["exists"] = root.exists()
        if root.exists():
            return CheckResult("url", "ok", f"{figures['url']}, a directory", figures)
        if self._reads_only:
            raise Failure(NotFoundError(f"{root} does not exist"), figures, "Check the path and the mount")
        self._folders += [root / STAGING, root, *(folder for folder in root.parents if not folder.exists())]
        remedy = "The first publisher creates it; if a run should be there, check the path and the mount"
        return CheckResult("url", "warning", f"{figures['url']} does not exist yet", figures, remedy)

    def library(self) -> CheckResult:
        """Check whether the client library for this scheme is installed and recent enough."""
        names = LIBRARIES.get(self._scheme, ())
        if not names:
            return CheckResult("library", "ok", "none needed")
        found = {name: _version(name) for name in names}
        missing = [name for name, version in found.items() if version is None]
        if missing:
            summary = f"{self._scheme}:// needs {' and '.join(missing)}, which is not installed in this Python"
            raise Failure(UsageError(summary), dict(found), f"Install it: {INSTALL}")
        for name, version in found.items():
            if _numbers(str(version)) < LEAST.get(name, ()):
                least = ".".join(map(str, LEAST[name]))
                remedy = f"Install {least} or later: {INSTALL}"
                raise Failure(UsageError(f"{name} {version} is too old"), dict(found), remedy)
        return CheckResult(
            "library", "ok", ", ".join(f"{name} {version}" for name, version in found.items()), dict(found)
        )

    def credentials(self) -> CheckResult:
        """Check where the credentials come from, and whether the store accepts them for reading."""
        if self.bucket is None:
            raise StoreError("the bucket was not opened")
        next(iter(self.bucket.list(PREFIX)), None)
        try:
            self.bucket.stat(RUN_KEY)
        except NotFoundError:
            pass
        if self.is_directory:
            return self._directory()
        if self._scheme == "memory":
            return CheckResult("credentials", "ok", "none needed; only this process sees this store")
        source = source_of(self._scheme)
        figures = {"source": source}
        if source is None:
            summary = "none found in the environment, but the store answers: through a role, or because it is public"
            return CheckResult("credentials", "ok", summary, figures)
        return CheckResult("credentials", "ok", f"accepted; {source}", figures)

    def _directory(self) -> CheckResult:
        if not self._root.exists():
            return CheckResult("credentials", "ok", "none needed")
        free = shutil.disk_usage(self._root).free
        figures = {"user": os.geteuid(), "owner": self._root.stat().st_uid, "free_bytes": free}
        return CheckResult("credentials", "ok", f"none needed, this user may read; {free / 1e9:.3g} GB free", figures)

    def remove_folders(self) -> None:
        """Remove empty directories that the checks created."""
        for folder in self._folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue  # never created
            except OSError:
                return  # another process has put something into it


def source_of(scheme: str) -> str | None:
    """Return the name of the variable or file that credentials come from, if known; never the credentials."""
    for name in VARIABLES.get(scheme, ()):
        if os.environ.get(name):
            return f"${name}"
    file = Path.home() / FILES[scheme] if scheme in FILES else None
    if scheme == "hf":
        from huggingface_hub import constants

        file = Path(constants.HF_TOKEN_PATH)
    return None if file is None or not file.is_file() else str(file)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
