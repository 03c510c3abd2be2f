"""Adapters for trainers: each module imports the framework that it is for.

Begin with ``transformers`` (``DeltaSyncCallback``) or ``trl`` (``DeltaWeightTransfer``).
"""
