"""For the Trainer of transformers: ``DeltaSyncCallback``."""

from trainer_side.callback import DeltaSyncCallback

__all__ = ["DeltaSyncCallback"]
