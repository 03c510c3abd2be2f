"""Change a run beside its publisher: merged deltas and anchors, tags, branches, key lists, exports.

May import ``client`` and what is below. Begin with ``compact``; ``gc`` and ``repair`` are packages of their own.
"""
