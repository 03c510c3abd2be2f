"""What the tests of models that do more than train in place share."""

from torch import nn

from tests.support.publishing import Tensors, assert_holds, snapshot
from vllm_delta_sync import open_run
from vllm_delta_sync.chain import Run


def published(model: nn.Module) -> Tensors:
    """What ``Plain`` and modules like it publish: the state of the moment, without tied duplicates."""
    seen: set[int] = set()
    kept: Tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            kept[name] = tensor
        seen.add(id(tensor))
    return snapshot(kept)


def assert_versions(url: str, history: list[Tensors]) -> Run:
    run = open_run(url)
    report = run.verify()
    assert (report.versions, report.replayed) == (len(history), True)
    for version, expected in enumerate(history):
        assert_holds(run, version, expected)
    return run
