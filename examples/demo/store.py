"""Where the demo's run lies: a directory, or a store that runs on this machine for as long as the demo does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = ("dir", "hf", "s3")
_SERVED = {"hf": "hub", "s3": "s3"}


@contextmanager
def running_store(kind: str, folder: Path) -> Iterator[str]:
    """URL of an empty run. What its clients need is in this process's environment, for the demo's processes to inherit.

    Args:
        kind: ``dir``, ``hf`` (a Hub on loopback, for the real huggingface_hub) or ``s3`` (moto on loopback).
        folder: for the objects; the directory itself for ``dir``.
    """
    if kind == "dir":
        yield str(folder)
        return
    # The servers are those of the tests; a directory needs none of what they are made of.
    from tests.support.stores import STORES

    with STORES[_SERVED[kind]](folder) as store:
        before = dict(os.environ)
        os.environ.update(store.environment)
        try:
            yield store.url
        finally:
            os.environ.clear()
            os.environ.update(before)
