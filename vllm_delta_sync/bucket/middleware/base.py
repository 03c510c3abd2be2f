"""``BucketMiddleware``: the base of all middleware, with one hook, ``_around``, through which every call goes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo
from vllm_delta_sync.errors import DeltaSyncError

PAGE = 1000
"""Keys requested at once in a listing."""
_ACTIONS = {
    "put": "write key",
    "get": "read key",
    "get_range": "read key",
    "stat": "look up key",
    "list": "list keys",
    "delete": "delete key",
}
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of ``Bucket``; of ``list``, the read of one page.

    Attributes:
        key: the prefix, for ``list``. data: what ``put`` sends.
    """

    method: Literal["put", "get", "get_range", "stat", "list", "delete"]
    key: str
    data: bytes | Path | None = None

    @property
    def action(self) -> str:
        """What the call does, as in "cannot ACTION of URL"."""
        return f"{_ACTIONS[self.method]} {self.key!r}"

    @property
    def direction(self) -> Literal["up", "down"] | None:
        """The direction of the object's bytes; None if the call transfers none."""
        return "up" if self.method == "put" else "down" if self.method.startswith("get") else None


class BucketMiddleware(Bucket):
    """A bucket that wraps another one and closes it with itself.

    A subclass overrides ``_around`` to do something around every call, and a method to change only that one.
    """

    def __init__(self, inner: Bucket) -> None:
        self._inner = inner
        self.url = inner.url
        self.supports_conditional_put = inner.supports_conditional_put
        self.overwrite_seconds = inner.overwrite_seconds

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        """Make a call and return its result.

        Args:
            run: makes the call in the inner bucket; it may be called again.
        """
        return run()

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List a valid prefix. Passes ``_around`` by, unless a subclass returns ``_list_pages``."""
        return self._inner.list(prefix)

    def _list_pages(self, prefix: str) -> Iterator[ObjectInfo]:
        """List a prefix in pages; the read of each page is a call. An error is raised after the keys before it."""
        items = iter(self._inner.list(prefix))
        failed: DeltaSyncError | None = None

        def read() -> Sequence[ObjectInfo]:
            nonlocal failed
            if failed is not None:
                raise failed
            page: list[ObjectInfo] = []
            try:
                page.extend(islice(items, PAGE))
            except DeltaSyncError as error:
                if not page:
                    raise
                failed = error
            return page

        while page := self._around(Call("list", prefix), read):
            yield from page

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self._around(Call("put", key, data=data), lambda: self._inner.put(key, data, if_absent=if_absent))

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._around(Call("get", key), lambda: self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._around(Call("get_range", key), lambda: self._inner.get_range(key, start, length))

    def stat(self, key: str) -> ObjectInfo:
        return self._around(Call("stat", key), lambda: self._inner.stat(key))

    def delete(self, key: str) -> None:
        self._around(Call("delete", key), lambda: self._inner.delete(key))

    @contextmanager
    def transfer(self, key: str, size: int) -> Iterator[None]:
        with self._inner.transfer(key, size):
            yield

    def close(self) -> None:
        self._inner.close()


def size_of(data: bytes | Path | None) -> int:
    """Return the size of a put's data or of a file; 0 for an unreadable file, which the call itself reports."""
    if data is None or isinstance(data, bytes):
        return len(data or b"")
    try:
        return data.stat().st_size
    except OSError:
        return 0
