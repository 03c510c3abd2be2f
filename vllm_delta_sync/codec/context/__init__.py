"""Codec ``context``: changes are coded by the base bits, which writer and reader both have.

May import ``format``, ``tensors`` and the rest of ``codec``. Begin with ``coder``; docs/FORMAT.md has the bit stream.
"""
