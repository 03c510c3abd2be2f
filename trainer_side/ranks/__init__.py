"""Publish one run from all ranks of a torch.distributed world, without gathering the model.

Begin with ``group`` (communication between ranks), then ``opening`` and ``coordinator`` (the weights of a rank).
"""
