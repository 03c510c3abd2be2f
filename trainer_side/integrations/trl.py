"""For TRL's ``AsyncGRPOTrainer``: ``DeltaWeightTransfer``. TRL's other trainers take ``DeltaSyncCallback``."""

from trainer_side.integrations.transformers_callback import DeltaSyncCallback
from trainer_side.integrations.trl_transfer import DeltaWeightTransfer

__all__ = ["DeltaSyncCallback", "DeltaWeightTransfer"]
