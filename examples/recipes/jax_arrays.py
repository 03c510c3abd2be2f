"""JAX: publish sharded arrays from all processes, each its addressable shards; nothing is gathered.

Written against jax 0.10.2. ``params`` returns the current arrays under the names of the checkpoint::

    publisher = Publisher(parts=lambda: jax_parts(named_arrays(state)), bucket=URL, base="Qwen/Qwen3-8B")

With several processes, also start a gloo group for the publishers, with the same ranks:
``torch.distributed.init_process_group("gloo", rank=jax.process_index(), world_size=jax.process_count(), …)``.
"""

from collections.abc import Container, Iterator, Mapping

import jax
from torch.utils.dlpack import from_dlpack

from trainer_side import Part


def jax_parts(arrays: Mapping[str, jax.Array], transposed: Container[str] = ()) -> Iterator[Part]:
    """Yield this process's shards of arrays; of replicas one.

    Args:
        arrays: name in the checkpoint → array.
        transposed: names of matrices that the checkpoint has transposed, such as Flax kernels.
    """
    host = jax.local_devices(backend="cpu")[0]
    for name, array in arrays.items():
        turned = name in transposed
        for shard in array.addressable_shards:
            if shard.replica_id:
                continue
            offsets = tuple(dimension.start or 0 for dimension in shard.index)
            # As an array of JAX's in host memory, not as one of NumPy's, which exports no bfloat16.
            tensor = from_dlpack(jax.device_put(shard.data, host))
            yield Part(
                name,
                array.shape[::-1] if turned else array.shape,
                offsets[::-1] if turned else offsets,
                tensor.t() if turned else tensor,
            )
