"""Read a run without vLLM and without a trainer: its head, its log, and the weights of any version, bit for bit."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.fleet.fleet import Fleet
from vllm_delta_sync.run.checks import check_base
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.model_files import read_file, read_sidecar
from vllm_delta_sync.run.restore import Progress, restore
from vllm_delta_sync.settings import client_settings
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.verify.verify import VerifyReport, verify_run

if TYPE_CHECKING:
    import torch

Version = int | str | None
"""A version's number, ``tag:NAME``, or None for the head."""


def open_run(
    url: str,
    keyring: Keyring | None = None,
    store: StoreOptions | None = None,
    cache: ObjectCache | None = None,
) -> "Run":
    """Open a run for reading. Close it with ``close``, or use it as a context manager::

        with open_run("/data/runs/a") as run:
            print(run.head().version)

    Args:
        url: run URL, such as ``hf://buckets/me/runs/a``, ``s3://bucket/runs/a`` or a plain path.
        keyring: trusted keys, such as ``Keyring.load("trainer.pub")``. None: the setting ``trusted_keys``; where that
            is not set either, signatures are not checked. ``Keyring()``: they are not checked in any case.
        store: how to talk to the store; None: as the settings say.
        cache: what objects are read through; None: each is fetched whenever it is needed.

    Raises:
        UsageError: the URL's scheme is not understood.
        SettingsError: a setting is unknown or does not fit, or a key file cannot be used.
        NotFoundError: there is no run at the URL.
        FormatError: run.json or tensors.json is malformed.
        SignatureError: the keyring has trusted keys, and none of them stands for the run.
    """
    if keyring is None:
        keyring = client_settings().keyring()
    with ExitStack() as failing:
        run = Run(failing.enter_context(open_bucket(url, store)), keyring, cache)
        failing.pop_all()
    return run


class Run(RunDocuments):
    """One run in a bucket, read only: its documents, and the weights of its versions."""

    def snapshot(
        self,
        version: Version = None,
        base: str | Path | None = None,
        in_memory: bool | None = None,
        progress: Progress | None = None,
    ) -> ModelState:
        """Rebuild a version.

        Args:
            version: a number, ``tag:NAME``, or None for the head.
            base: checkpoint directory of version 0, where the run refers to one that is not at the recorded path; or
                the URL of the run that this one branches from.
            in_memory: see ``run.restore.restore``. progress: called with bytes so far and in all.

        Raises:
            NotFoundError: there is no such version, or the base is not at hand.
            FingerprintError, TensorMismatchError: weights, or those of the base, are not as declared.
            DeltaSyncError: something that is needed is damaged or missing.
        """
        check_base(base)
        return restore(self, self.resolve(version), base, in_memory, progress).state

    def tensors(
        self, version: Version = None, base: str | Path | None = None, names: Collection[str] | None = None
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """(checkpoint name, tensor) of a version, bit-exact, in the served dtypes.

        Tensors of large models lie in a temporary file, and are read from it when they are touched.

        Args:
            version, base: as ``snapshot``. names: only these.

        Raises:
            TensorMismatchError: the run has no tensor of one of the names. Else as ``snapshot``.
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

        Where tensors of the target are sharded (DTensors, such as of FSDP2, or parameters that ZeRO-3 has partitioned),
        every rank calls this, each fills what it holds, and none takes the memory of more than that: see
        ``run.partial.restore_boxes``. The ranks do not talk to each other; while a publisher is at work, name the
        version, since the head may be another one for each rank.

        Args:
            target: what has the run's tensor names; a model that fuses tensors of its checkpoint in memory (such as
                the experts of a mixture) has others. A tensor that another of its names fills already (a tied head)
                need not be in the run.
            version, base: as ``snapshot``.
            strict: whether every tensor of the target must be in the run, and the reverse.

        Raises:
            TensorMismatchError: names or shapes do not fit, a target's dtype cannot hold the values exactly, or a
                target has no memory (device ``meta``); nothing is written. ModelError: it is sharded in a way that is
                not understood. Else as ``snapshot``.
        """
        import torch

        from vllm_delta_sync.run.partial import any_sharded, check_places, fill_shards

        places = dict(target.state_dict(keep_vars=True) if isinstance(target, torch.nn.Module) else target)
        check_places(places, {spec.name: spec for spec in self.table}, strict)
        if any_sharded(places):
            fill_shards(self, self.resolve(version), places, base)
            return
        with torch.no_grad():
            for name, tensor in self.tensors(version, base):
                if name in places:
                    places[name].copy_(tensor)

    def sidecar(self, version: Version, name: str) -> bytes:
        """What the publisher stored beside a version under a name, bit for bit.

        Args:
            version: as ``snapshot``. name: one of those in ``manifest(version).sidecars``.

        Raises:
            NotFoundError: there is no such version or sidecar, or retention removed it with the version.
            DigestError, LimitError: it is not what the manifest lists. StoreError: the store failed. Else as
                ``resolve``.
        """
        return read_sidecar(self, self.resolve(version), name)

    def file(self, name: str) -> bytes:
        """One of the model's small files that the run keeps, such as ``config.json``; ``info.files`` lists them.

        Raises:
            NotFoundError: the run has no file of that name, or the bucket has lost it.
            DigestError, LimitError: it is not what run.json lists. StoreError: the store failed.
        """
        return read_file(self, name)

    def fleet(self) -> Fleet:
        """The receivers that follow the run and say so in it (setting ``receiver_id``): who serves what, who is gone.

        Raises:
            StoreError: the store failed.
        """
        found = Fleet(self)
        found.look()
        return found

    def verify(
        self,
        base: str | Path | None = None,
        progress: Callable[[VerifyReport], None] | None = None,
        findings: bool = False,
    ) -> VerifyReport:
        """Check all of the run: chain, digests, contents, and the weights of every version that is kept.

        Args:
            base: as ``snapshot``. progress: called with the report so far, now and then.
            findings: go on after something that does not hold, and list it in the report, rather than raise it.

        Raises:
            NotFoundError: ``base`` is given and not there. StoreError: the store failed.
            DeltaSyncError: without ``findings``, the first thing that does not hold, by version, object and tensor.
        """
        # A mirror or cache in front of the bucket would hide what is damaged in there.
        bucket = self.bucket.origin if isinstance(self.bucket, OpenedBucket) else self.bucket
        bare = bucket is self.bucket and self.cache is None
        return verify_run(self if bare else type(self)(bucket, self.keyring), base, progress, findings)
