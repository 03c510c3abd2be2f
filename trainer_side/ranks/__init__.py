"""Publish one run from all ranks of a torch.distributed world, without gathering the model.

Begin with ``group`` (what ranks tell each other), then ``rank_session`` and ``rank_committer``.
"""
