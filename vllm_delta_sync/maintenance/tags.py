"""Tags: names for versions that retention keeps.

A tag and a collection may come at the same time. The collection says in retention.json what it is about to remove,
then looks at the tags, then removes. The tag is put first, then looks whether its version can be rebuilt without what
retention.json gives up. So one of the two sees the other: the version is kept, or the tag is refused.
"""

import re

from vllm_delta_sync.errors import ConflictError, DeltaSyncError, NotFoundError, StoreError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import Tag, tag_key
from vllm_delta_sync.format.manifest import timestamp
from vllm_delta_sync.maintenance.gc.record import lasting_plan
from vllm_delta_sync.run.documents import RunDocuments

_REBASE = re.compile(r"rebase-([0-9]{1,10})-[0-9]{1,10}")


def rebase_tag(epoch: int, version: int) -> str:
    """Name of the tag by which the writer of an epoch holds the version that its next one is to build on."""
    return f"rebase-{epoch}-{version}"


def rebase_epoch(name: str) -> int | None:
    """The epoch of the writer that set such a tag; None if it is another."""
    match = _REBASE.fullmatch(name)
    return None if match is None else int(match[1])


def set_tag(run: RunDocuments, name: str, version: int | str | None = None, milestone: bool = False) -> Tag:
    """Give a version a name; a tag of that name moves there.

    Args:
        version: a number, ``tag:NAME``, or None for the head. milestone: whether it shall get an anchor of its own.

    Raises:
        UsageError: the name is none. NotFoundError: no such version, or it is not kept any more; the tag is then as
            it was. ConflictError: the tag of that name is held by a branch. StoreError: the store failed.
    """
    return put_tag(run, name, version, milestone)


def put_tag(
    run: RunDocuments, name: str, version: int | str | None, milestone: bool = False, branch: str | None = None
) -> Tag:
    """As ``set_tag``, also for a branch: the URL of the run that will need the version."""
    key = tag_key(name)
    before = _held(run, key)
    held = None if before is None else _branch_of(before, key)
    if held is not None:
        raise ConflictError(
            f"tag {name!r} keeps a version for the run that branches to {held!r}; choose another name, or delete it "
            "if that run is gone"
        )
    manifest = run.resolve(version)
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
    except BaseException:  # an interrupted tag may not stay either: nobody has checked its version
        _put_back(run, key, tag.to_bytes(), before)
        raise
    return tag


def delete_tag(run: RunDocuments, name: str) -> None:
    """Remove a tag, damaged or not; retention may remove its version from now on.

    Raises:
        UsageError: the name is none. NotFoundError: there is no such tag. StoreError: the store failed.
    """
    key = tag_key(name)
    if _held(run, key) is None:
        raise NotFoundError(f"run {run.info.run} has no tag {name!r}")
    run.bucket.delete(key)


def _held(run: RunDocuments, key: str) -> bytes | None:
    """A tag's bytes; None if there is none, no bytes if there is one that is no tag."""
    try:
        return run.bucket.get(key, max_bytes=limits.MAX_SIDE_BYTES)
    except NotFoundError:
        return None
    except StoreError:
        raise
    except DeltaSyncError:
        return b""


def _branch_of(data: bytes, key: str) -> str | None:
    try:
        return Tag.from_bytes(data, key).branch
    except DeltaSyncError:
        return None


def _put_back(run: RunDocuments, key: str, written: bytes, before: bytes | None) -> None:
    """Undo a tag, unless somebody else has set it meanwhile."""
    if _held(run, key) != written:
        return
    if before:
        run.bucket.put(key, before)
    else:
        run.bucket.delete(key)
