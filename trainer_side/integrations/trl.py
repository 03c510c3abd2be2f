"""For TRL's ``AsyncGRPOTrainer``: ``DeltaWeightTransfer``. TRL's other trainers take ``DeltaSyncCallback``."""

from trainer_side.callback import DeltaSyncCallback
from trainer_side.transfer import DeltaWeightTransfer

__all__ = ["DeltaSyncCallback", "DeltaWeightTransfer"]
