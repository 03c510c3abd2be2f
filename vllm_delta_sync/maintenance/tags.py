"""``set_tag`` and ``delete_tag``: names for versions that garbage collection keeps.

A tag may be set during a collection. The collection announces in retention.json what it will remove, then reads the
tags, then removes. ``set_tag`` first puts the tag, then checks whether its version can be rebuilt without what
retention.json announces. So one of the two sees the other: the version is kept, or the tag is refused.
"""

import re

from vllm_delta_sync.errors import ChainError, ConflictError, DataError, NotFoundError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import Tag, tag_key
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.maintenance.gc.record import lasting_plan
from vllm_delta_sync.run.run_reader import RunReader

_REBASE = re.compile(r"rebase-([0-9]{1,10})-[0-9]{1,10}")


def rebase_tag(epoch: int, version: int) -> str:
    """Return the tag with which an epoch's publisher keeps the version that its next one builds on."""
    return f"rebase-{epoch}-{version}"


def rebase_epoch(name: str) -> int | None:
    """Return the epoch in the name of a rebase tag; None for another tag."""
    match = _REBASE.fullmatch(name)
    return None if match is None else int(match[1])


def set_tag(
    run: RunReader,
    name: str,
    version: int | str | None = None,
    milestone: bool = False,
    branch: str | None = None,
    rebase: bool = False,
) -> Tag:
    """Tag a version; an existing tag of that name moves to it.

    Args:
        version: a number, ``tag:NAME``, or None for the head. milestone: whether the version gets an anchor.
        branch: for the tag of a branch, the URL of the run that needs the version.
        rebase: whether it is a ``rebase_tag``, which the next publisher removes.

    Raises:
        UsageError: the name is not valid, or is that of a ``rebase_tag``. NotFoundError: no such version, or it was
        removed; the tag is unchanged. FormatError: an object that it needs is damaged. ConflictError: a branch needs
        the tag of that name. ChainError: the version's manifest was altered; or, without trusted keys, the manifest
        after it is unreadable, which alone shows that. The tag's digest would be wrong once the manifest is repaired.
        StoreError: the store failed.
    """
    key = tag_key(name)
    if not rebase and rebase_epoch(name) is not None:
        raise UsageError(f"tag {name!r} has a name that publishers use and remove; choose another")
    before = _stored(run, key)
    try:
        branch_url = None if before is None else Tag.from_bytes(before, key).branch
    except DataError:
        branch_url = None
    if branch_url is not None:
        raise ConflictError(
            f"tag {name!r} keeps a version for the branch {branch_url!r}; choose another name, or delete the tag if "
            "that run no longer exists"
        )
    manifest = run.resolve(version)
    _check_unaltered(run, manifest)
    lasting_plan(run, manifest)
    tag = Tag(
        run=run.info.run,
        name=name,
        version=manifest.version,
        manifest=manifest.digest,
        milestone=milestone,
        branch=branch,
        created_at=timestamp(),
    )
    tag = run.keyring.signed(tag)
    try:
        run.bucket.put(key, tag.to_bytes())
        lasting_plan(run, manifest)
    except BaseException:  # including interrupts: the version of the new tag was not checked
        _restore(run, key, tag.to_bytes(), before)
        raise
    return tag


def delete_tag(run: RunReader, name: str) -> None:
    """Delete a tag, even a damaged one; gc may then remove its version.

    Raises:
        UsageError: the name is not valid. NotFoundError: there is no such tag. StoreError: the store failed.
    """
    key = tag_key(name)
    if _stored(run, key) is None:
        raise NotFoundError(f"run {run.info.run} has no tag {name!r}")
    run.bucket.delete(key)


def _check_unaltered(run: RunReader, manifest: Manifest) -> None:
    """Compare a manifest's digest with what names it: without a signature, a changed digit of a time does not show."""
    try:
        following = run.manifest(manifest.version + 1)
    except NotFoundError:
        # HEAD.json names the newest version; this raises ChainError if it names another manifest.
        run.head()
        return
    except DataError as error:
        if run.keyring.checks_signatures:
            return
        raise ChainError(
            f"version {manifest.version} gets no tag: only the manifest of version {manifest.version + 1} shows "
            f"whether its own was altered, and it cannot be read ({error}); run `delta-sync repair`, or choose "
            "another version"
        ) from error
    if following.parent != manifest.digest:
        raise ChainError(
            f"the manifest of version {manifest.version} has digest {manifest.digest}, but version {following.version} "
            f"was made after {following.parent}: one of them was altered; run `delta-sync verify`"
        )


def _stored(run: RunReader, key: str) -> bytes | None:
    """Return a tag's bytes; None if there is no tag, empty if it is too large to be one."""
    try:
        return run.bucket.get(key, max_bytes=limits.MAX_SIDE_BYTES)
    except NotFoundError:
        return None
    except DataError:
        return b""


def _restore(run: RunReader, key: str, written: bytes, before: bytes | None) -> None:
    """Restore the previous tag, unless another writer has set it meanwhile."""
    if _stored(run, key) != written:
        return
    if before:
        run.bucket.put(key, before)
    else:
        run.bucket.delete(key)
