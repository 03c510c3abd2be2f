"""``parse_store_url``, ``check_url`` and ``check_key``: URLs of runs and keys of objects in them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.logs import public_url

MAX_KEY_BYTES = 512
MAX_KEY_PART_BYTES = 255
"""One part of a key becomes a file name; common file systems allow no more."""

_PART = re.compile(r"[A-Za-z0-9._-]+")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")
_MISSPELLED = re.compile(r"(hf|s3|gs|az|memory)(?::|//)", re.IGNORECASE)
OBJECT_STORES = ("s3", "gs", "az", "memory")
_SUPPORTED_URLS = (
    "a path, file:///absolute/path, hf://buckets/NAMESPACE/BUCKET/run, s3://bucket/run, gs://bucket/run, "
    "az://container/run or memory://name"
)


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """The parts of a store's URL ``scheme://authority/prefix``; the prefix has no slash at either end."""

    scheme: str
    authority: str
    prefix: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}" + (f"/{self.prefix}" if self.prefix else "")


def check_url(url: str) -> None:
    """Raise UsageError if the URL is invalid for any bucket. The environment does not matter."""
    check_no_credentials(url)
    scheme = scheme_of(url)
    if scheme == "file":
        local_path(url)
    elif scheme in ("hf", *OBJECT_STORES):
        parse_store_url(url)
    else:
        raise unknown_scheme(url)


def scheme_of(url: str) -> str:
    """Return the scheme of a bucket URL in lower case; ``file`` for a bare path."""
    scheme = _SCHEME.match(url)
    if scheme is None or (scheme[1].lower() != "file" and scheme[2] is None):
        return "file"
    return scheme[1].lower()


def is_remote(url: str) -> bool:
    """Return whether requests to a bucket take longer than starting a thread, so that several at once save time."""
    return scheme_of(url) not in ("file", "memory")


def store_of(url: str) -> str:
    """Return the part of a URL that credentials belong to: scheme and bucket; ``file`` for a directory."""
    scheme = scheme_of(url)
    parts = url.split("/")
    # hf://buckets/NAMESPACE/BUCKET, and scheme://bucket elsewhere.
    return "file" if scheme == "file" else "/".join([f"{scheme}:", *parts[1 : 5 if scheme == "hf" else 3]])


def parse_store_url(url: str) -> StoreLocation:
    """Split a store's URL into its parts.

    Raises:
        UsageError: the URL has no authority, or its path is not a valid prefix of keys.
    """
    scheme = scheme_of(url)
    authority, _, prefix = url[len(scheme) + 3 :].partition("/")
    prefix = prefix.rstrip("/")
    if re.fullmatch(r"[A-Za-z0-9._-]+:[0-9]+|\[[0-9A-Fa-f:.]+\]:[0-9]+", authority):
        raise UsageError(
            f"bucket URL {url!r} names a host and a port: write {scheme}://bucket/run, and set store_endpoint to the "
            "address of the store"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]+", authority):
        raise UsageError(f"bucket URL {url!r} names no bucket: write {scheme}://bucket/run")
    if prefix:
        try:
            check_key(prefix)
        except UsageError as error:
            raise UsageError(f"bucket URL {url!r} has a path that cannot be used: {error.message}") from error
    return StoreLocation(scheme, authority, prefix)


def unknown_scheme(url: str) -> UsageError:
    """Return the error for a URL with an unknown scheme."""
    return UsageError(f"bucket URL {url!r} has the unknown scheme {scheme_of(url)!r}; supported: {_SUPPORTED_URLS}")


def check_no_credentials(url: str) -> None:
    """Raise UsageError if a URL contains credentials: URLs are shown, logged, and recorded by branches."""
    if scheme_of(url) != "file" and public_url(url) != url:
        raise UsageError(
            f"bucket URL {url!r} has a user, a password, a query or a fragment; remove it, and give credentials in the "
            "environment"
        )


def local_path(url: str) -> Path:
    """Return the directory that a bare path or a ``file:`` URL names.

    Raises:
        UsageError: the URL is empty, names another host, or is a misspelled URL of another scheme.
    """
    # A variable from a file with the line ends of Windows ends in a carriage return, and would make another folder.
    if not url or _CONTROL.search(url):
        raise UsageError(f"bucket URL {url!r} is empty or has a control character; give {_SUPPORTED_URLS}")
    scheme = _SCHEME.match(url)
    if scheme is None or (scheme[1].lower() != "file" and scheme[2] is None):
        misspelled = _MISSPELLED.match(url)
        if misspelled is not None:
            # Otherwise a folder of that name would be created, or waited for forever.
            raise UsageError(
                f"bucket URL {url!r} is a path that begins like {misspelled[1].lower()}://; write "
                f"{misspelled[1].lower()}://…, or ./{url} for a folder of that name"
            )
        if url[0] in "~$'\" ":
            raise UsageError(
                f"bucket URL {url!r} begins with {url[0]!r}, which only a shell replaces or removes, not within quotes "
                f"and not in Docker's env file; write the whole path or URL, or ./{url} for a folder of that name"
            )
        return Path(url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"bucket URL {url!r} is not valid: {error}; write file:///absolute/path") from error
    if scheme[2] is None or not parts.path.startswith("/"):
        raise UsageError(f"bucket URL {url!r} has no absolute path; write file:///absolute/path")
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"bucket URL {url!r} names the host {parts.netloc!r}; a file URL has none: file:///absolute/path"
        )
    if parts.query or parts.fragment:
        raise UsageError(f"bucket URL {url!r} has a '?' or '#'; write them as %3F and %23 in a file URL")
    # As the bytes of a name, which need not be UTF-8.
    path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))
    if _CONTROL.search(path):
        raise UsageError(f"bucket URL {url!r} has a control character in its path; give {_SUPPORTED_URLS}")
    return Path(path)


def check_key(key: str) -> str:
    """Return ``key`` if it is valid.

    Raises:
        UsageError: it is not; the message names the broken rule.
    """
    if len(key) > MAX_KEY_BYTES:
        raise UsageError(f"key {key[:80]!r}… has {len(key)} characters; at most {MAX_KEY_BYTES} are allowed")
    for part in key.split("/"):
        _check_part(part, key)
    return key


def check_prefix(prefix: str) -> None:
    """Raise UsageError, which names the broken rule, unless a valid key can begin with ``prefix``."""
    if len(prefix) > MAX_KEY_BYTES:
        raise UsageError(f"prefix {prefix[:80]!r}… has {len(prefix)} characters; at most {MAX_KEY_BYTES} are allowed")
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(f"prefix {prefix!r} cannot begin a key: use A-Z a-z 0-9 . _ - and /")
    for part in prefix.split("/")[:-1]:
        _check_part(part, prefix)


def _check_part(part: str, key: str) -> None:
    if not _PART.fullmatch(part) or part == "." or part.endswith(".."):
        raise UsageError(
            f"key {key!r} has the part {part!r}; a part consists of A-Z a-z 0-9 . _ -, is not '.' and does not end in "
            "'..'"
        )
    if len(part) > MAX_KEY_PART_BYTES:
        raise UsageError(f"key {key[:80]!r}… has a part of {len(part)} characters; {MAX_KEY_PART_BYTES} are allowed")
