"""Change a run beside its publisher: merged deltas and anchors, tags, branches, key lists, exports.

May import ``client`` and the packages below it. Start with ``compact``; see also the packages ``gc`` and ``repair``.
"""
