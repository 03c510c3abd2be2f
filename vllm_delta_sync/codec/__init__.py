"""Delta objects: encode the changes between two versions, decode them, and merge several deltas into one.

May import ``format`` and ``tensors``. Begin with ``delta_writer`` and ``delta_reader``; ``delta_object`` has what both
share. Codec ``tiled`` is the default, ``plain`` needs no weights to be read, and any safetensors reader reads ``raw``.
"""
