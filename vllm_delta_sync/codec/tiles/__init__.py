"""Tiles of tensors, each coded by itself: changed elements by their ranks in classes of old magnitudes, or plainly.

May import ``format``, ``tensors`` and the rest of ``codec``. Begin with ``coder``; docs/FORMAT.md specifies every byte.
"""
