"""``open_run`` opens a run for reading, without vLLM or a trainer: its head, log, and any version's exact weights."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.fleet.fleet import Fleet
from vllm_delta_sync.run.checks import check_base_exists
from vllm_delta_sync.run.model_files import read_file, read_sidecar
from vllm_delta_sync.run.restore import Progress, restore
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.settings import client_settings
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.verify.verify import VerifyReport, verify_run

if TYPE_CHECKING:
    import torch

Version = int | str | None
"""A version's number or name, or None for the head; see ``RunReader.resolve``."""


def open_run(
    url: str | Path,
    keyring: Keyring | None = None,
    store: StoreOptions | None = None,
    cache: ObjectCache | None = None,
) -> "Run":
    """Open a run for reading. Close it with ``close``, or use it as a context manager::

        with open_run("/data/runs/a") as run:
            print(run.head().version)

    Args:
        url: run URL, such as ``hf://buckets/me/runs/a``, ``s3://bucket/runs/a`` or a plain path.
        keyring: trusted keys, such as ``Keyring.load("trainer.pub")``. None means the setting ``trusted_keys``; if that
            is not set either, signatures are not checked. ``Keyring()``: signatures are never checked.
        store: store options; None means those of the settings.
        cache: cache for objects; if None, each object is fetched whenever it is needed.

    Raises:
        UsageError: the URL's scheme is unknown.
        SettingsError: a setting is unknown or invalid, or a key file cannot be used.
        NotFoundError: there is no run at the URL.
        FormatError: run.json or tensors.json is malformed.
        SignatureError: the keyring has trusted keys, and run.json is not validly signed.
    """
    if keyring is None:
        keyring = client_settings().keyring()
    with ExitStack() as failing:
        run = Run(failing.enter_context(open_bucket(url, store)), keyring, cache)
        failing.pop_all()
    return run


class Run(RunReader):
    """One run in a bucket, opened for reading: its documents, and the weights of its versions."""

    def snapshot(
        self,
        version: Version = None,
        base: str | Path | None = None,
        in_memory: bool | None = None,
        progress: Progress | None = None,
    ) -> ModelState:
        """Rebuild a version.

        Args:
            version: a number, a name such as ``tag:NAME`` or ``step:400`` (see ``resolve``), or None for the head.
            base: checkpoint directory of version 0, if it is not at the recorded path; or the URL of the run that this
                one branches from.
            in_memory: see ``run.restore.restore``. progress: called with bytes done and bytes in total.

        Raises:
            NotFoundError: there is no such version, or the base is not there.
            FingerprintError, TensorMismatchError: the weights, or those of the base, are not as declared.
            DeltaSyncError: a document or object that is needed is damaged or missing.
        """
        check_base_exists(base)
        return restore(self, self.resolve(version), base, in_memory, progress).state

    def tensors(
        self, version: Version = None, base: str | Path | None = None, names: Collection[str] | None = None
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield (checkpoint name, tensor) of a version, bit-exact, in the served dtypes.

        Tensors of large models are mapped from a temporary file, and read from it when they are used.

        Args:
            version, base: as ``snapshot``. names: only these tensors.

        Raises:
            TensorMismatchError: the run has no tensor of one of the names. Otherwise as ``snapshot``.
        """
        from vllm_delta_sync.tensors.torch_views import tensor_from_bits

        chosen = None if names is None else {self.table.by_name(name).name for name in names}
        state = self.snapshot(version, base)
        for spec, bits in zip(self.table, state.bits, strict=True):
            if chosen is None or spec.name in chosen:
                yield spec.name, tensor_from_bits(bits, spec)

    def load_into(
        self,
        target: "torch.nn.Module | Mapping[str, torch.Tensor]",
        version: Version = None,
        base: str | Path | None = None,
        strict: bool = True,
    ) -> None:
        """Write a version's weights into a model or a state dict, in place, one tensor at a time.

        If tensors of the target are sharded (DTensors, as in FSDP2, or parameters partitioned by ZeRO-3), call this on
        every rank. Each rank fills the parts that it holds and needs no more memory than those; see
        ``run.partial.restore_boxes``. The ranks do not communicate, so name the version while a publisher is running:
        each rank might see another head.

        Args:
            target: a model or state dict with the run's tensor names. A model that fuses tensors of its checkpoint in
                memory (such as the experts of a mixture) has other names. A tensor that is filled under another name
                (a tied head) need not be in the run. What is no tensor (``_extra_state``) is left alone.
            version, base: as ``snapshot``.
            strict: whether every tensor of the target must be in the run, and the reverse.

        Raises:
            TensorMismatchError: names or shapes do not fit, a target's dtype cannot hold the values exactly, a target
                has no memory (device ``meta``), or names that the target ties have different values in the run; nothing
                is written. ModelError: a tensor is sharded in an unsupported way. Otherwise as ``snapshot``.
        """
        import torch

        from vllm_delta_sync.run.partial import any_sharded, check_targets, check_ties, fill_shards

        found = target.state_dict(keep_vars=True) if isinstance(target, torch.nn.Module) else target
        targets = {
            name: value for name, value in found.items() if isinstance(value, torch.Tensor) or name in self.table
        }
        check_targets(targets, {spec.name: spec for spec in self.table}, strict)
        if any_sharded(targets):
            fill_shards(self, self.resolve(version), targets, base)
            return
        fresh = {name: tensor for name, tensor in self.tensors(version, base) if name in targets}
        check_ties(targets, {name: [tensor] for name, tensor in fresh.items()})
        with torch.no_grad():
            for name, tensor in fresh.items():
                targets[name].copy_(tensor)

    def sidecar(self, version: Version, name: str) -> bytes:
        """Return the bytes of a sidecar that the publisher stored with a version.

        Args:
            version: as ``snapshot``. name: one of those in ``manifest(version).sidecars``.

        Raises:
            NotFoundError: there is no such version or sidecar, or retention removed it with the version.
            DigestError, LimitError: it is not what the manifest lists. StoreError: the store failed. Otherwise as
                ``resolve``.
        """
        return read_sidecar(self, self.resolve(version), name)

    def file(self, name: str) -> bytes:
        """Return the bytes of one of the model's files in the run, such as ``config.json``; ``info.files`` lists them.

        Raises:
            NotFoundError: the run has no file of that name, or the bucket lost it.
            DigestError, LimitError: it is not what run.json lists. StoreError: the store failed.
        """
        return read_file(self, name)

    def fleet(self) -> Fleet:
        """Return the receivers that write heartbeats (setting ``receiver_id``): what each serves, and which ended.

        Raises:
            StoreError: the store failed.
        """
        found = Fleet(self)
        found.poll()
        return found

    def verify(
        self,
        base: str | Path | None = None,
        progress: Callable[[VerifyReport], None] | None = None,
        findings: bool = False,
    ) -> VerifyReport:
        """Check the whole run: history, digests, contents, and the weights of every version that is kept.

        Args:
            base: as ``snapshot``. progress: called with the report so far after each version.
            findings: list problems in the report and continue, instead of raising the first.

        Raises:
            NotFoundError: ``base`` is given and not there. StoreError: the store failed.
            DeltaSyncError: without ``findings``, the first problem; names the version and the object or document, or
                the tensor if weights are not as declared.
        """
        # A mirror or cache in front of the bucket would hide damage in the bucket.
        bucket = self.bucket.origin if isinstance(self.bucket, OpenedBucket) else self.bucket
        bare = bucket is self.bucket and self.cache is None
        return verify_run(self if bare else type(self)(bucket, self.keyring), base, progress, findings)
