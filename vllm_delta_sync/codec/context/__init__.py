"""Codec ``context``: changes coded by the bits that were there before, which both sides have.

May import ``format``, ``tensors`` and the rest of ``codec``. Begin with ``coder``; docs/FORMAT.md has the bit stream.
"""
