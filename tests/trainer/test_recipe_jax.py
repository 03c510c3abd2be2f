"""The recipe for JAX, in a process with four devices of its own, which publishes what they hold and gathers nothing."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from tests.support.publishing import assert_holds
from tests.support.running import run_python
from vllm_delta_sync import open_run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")


def train(url: str) -> None:
    """Train sharded arrays with JAX, publish each step, and save what the checkpoint should be."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from examples.recipes.jax_arrays import jax_parts
    from trainer_side import Publisher

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "columns"))
    layouts = {"both": ("rows", "columns"), "kernel": (None, "columns"), "norm": (None,)}
    shapes = {"both": (8, 12), "kernel": (6, 10), "norm": (16,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    state = {
        name: jax.device_put(
            jax.random.normal(key, shape, jnp.bfloat16), NamedSharding(mesh, PartitionSpec(*layouts[name]))
        )
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    step_of = jax.jit(lambda state, rate: jax.tree.map(lambda x: x - rate * jnp.sin(x), state))
    with Publisher(parts=lambda: jax_parts(state, transposed={"kernel"}), bucket=url) as publisher:  # type: ignore[call-arg]
        for step in range(1, 4):
            state = step_of(state, jnp.bfloat16(0.05))
            publisher.publish(step, wait=True)
    whole = {name: from_dlpack(jnp.array(jax.device_get(array))) for name, array in state.items()}
    whole["kernel"] = whole["kernel"].t().contiguous()
    torch.save(whole, f"{url}.pt")


def test_arrays_over_four_devices_are_published_shard_by_shard(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    code = f"from tests.trainer.test_recipe_jax import train; train({url!r})"
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run_python("-c", code, environment=devices)
    with open_run(url) as run:
        assert_holds(run, 3, torch.load(f"{url}.pt"))
        assert all(run.manifest(version).changed for version in (1, 2, 3))
        assert run.verify().head == 3
