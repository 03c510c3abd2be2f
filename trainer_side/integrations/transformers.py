"""For the Trainer of transformers: ``DeltaSyncCallback``."""

from trainer_side.integrations.transformers_callback import DeltaSyncCallback

__all__ = ["DeltaSyncCallback"]
