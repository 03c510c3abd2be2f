"""Any sequence of calls leaves a bucket as it would leave a dict."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import ConflictError, NotFoundError

KEYS = st.sampled_from(["a/x", "a/y", "a-x", "a.x", "b/x/deep", "b/x/deeper", "HEAD.json", "b-x"])
DATA = st.binary(max_size=40)


class DictMachine(RuleBasedStateMachine):
    """Calls at random, each compared with what a dict does.

    Attributes:
        bucket: opened by a subclass, empty. folder: for its files. stack: is closed at the end.
        answers_are_lost: whether a creation may be refused because an earlier try of it took effect.
    """

    bucket: Bucket
    answers_are_lost = False

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.model: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.stack.close()

    def source(self, data: bytes, as_file: bool) -> bytes | Path:
        if not as_file:
            return data
        (self.folder / "source").write_bytes(data)
        return self.folder / "source"

    @rule(key=KEYS, data=DATA, as_file=st.booleans())
    def put(self, key: str, data: bytes, as_file: bool) -> None:
        self.bucket.put(key, self.source(data, as_file))
        self.model[key] = data

    @rule(key=KEYS, data=DATA, as_file=st.booleans())
    def create(self, key: str, data: bytes, as_file: bool) -> None:
        try:
            self.bucket.put(key, self.source(data, as_file), if_absent=True)
            created = True
        except ConflictError:
            created = False
        own = self.answers_are_lost and self.bucket.get(key) == data == self.model.get(key, data)
        assert own or created == (key not in self.model)
        self.model.setdefault(key, data)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.bucket.delete(key)
        self.model.pop(key, None)

    @rule(key=KEYS, start=st.integers(0, 50), length=st.integers(0, 50))
    def read(self, key: str, start: int, length: int) -> None:
        if key in self.model:
            assert self.bucket.get(key) == self.model[key]
            assert self.bucket.get_range(key, start, length) == self.model[key][start : start + length]
            assert self.bucket.stat(key).bytes == len(self.model[key])
        else:
            for call in (self.bucket.get, self.bucket.stat, lambda key: self.bucket.get_range(key, start, length)):
                with pytest.raises(NotFoundError):
                    call(key)

    @rule(prefix=st.sampled_from(["a", "a/", "b/x", "b/x/deep", "H", "c"]))
    def list_prefix(self, prefix: str) -> None:
        found = [info.key for info in self.bucket.list(prefix)]
        assert found == sorted(key for key in self.model if key.startswith(prefix))

    @invariant()
    def lists_all(self) -> None:
        found = [(info.key, info.bytes) for info in self.bucket.list()]
        assert found == sorted((key, len(data)) for key, data in self.model.items())
