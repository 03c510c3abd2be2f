"""Arrays of bits: comparing them, applying changes, boxes of sharded tensors, and views of torch tensors.

May import ``format``. Only ``torch_views`` and ``torch_sharding`` know torch. Begin with ``changes``, which is what
encoders, decoders and receivers exchange.
"""
