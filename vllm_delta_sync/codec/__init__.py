"""Delta objects: encode what changed between two versions, decode it, and merge several deltas into one.

May import ``format`` and ``tensors``. Begin with ``delta_object``; ``packed`` is the default codec, ``context`` the
smallest, ``raw`` the one that any safetensors reader understands.
"""
