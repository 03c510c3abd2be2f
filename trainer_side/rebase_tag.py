"""The tag that keeps a version which a publisher has rebased to, until the next version builds on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError
from vllm_delta_sync.format.documents import TAGS_PREFIX, tag_of_key
from vllm_delta_sync.maintenance.tags import delete_tag, rebase_epoch, rebase_tag, set_tag
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)


class RebaseTag:
    """At most one tag of this writer; until the next version nothing else tells retention that it is needed.

    Args:
        run: gives the run. epoch: of its writer.
    """

    def __init__(self, run: Callable[[], Run], epoch: int) -> None:
        self._run = run
        self._epoch = epoch
        self._name: str | None = None
        self._swept = epoch == 0

    @contextmanager
    def keeping(self, version: int) -> Iterator[None]:
        """Keep a version instead of the one kept before; if what is done within fails, keep that one after all."""
        name = rebase_tag(self._epoch, version)
        set_tag(self._run(), name, version)
        before, self._name = self._name, name
        try:
            yield
        except BaseException:  # an interrupted rebase holds what it held before
            before, self._name = name, before
            raise
        finally:
            self._drop(before)

    def release(self) -> None:
        """Give the tag up; a failure only warns."""
        name, self._name = self._name, None
        self._drop(name)

    def sweep(self) -> None:
        """Remove tags that hold what former writers of the run had rebased to when they ended; only the first time.

        Only after a commit: until then the last version of such a writer may appear, which builds on what they hold.
        """
        if self._swept:
            return
        self._swept = True
        try:
            names = [tag_of_key(item.key) for item in self._run().bucket.list(TAGS_PREFIX + "rebase-")]
        except DeltaSyncError as error:
            logger.warning("whether former writers have left tags is not known: %s", error)
            return
        for name in names:
            epoch = None if name is None else rebase_epoch(name)
            if epoch is not None and epoch < self._epoch:
                self._drop(name)

    def _drop(self, name: str | None) -> None:
        try:
            if name is not None:
                delete_tag(self._run(), name)
        except NotFoundError:
            return
        except DeltaSyncError as error:
            logger.warning("tag %r is left in the run; delete it (delta-sync tag --delete): %s", name, error)
