"""What vLLM makes of its flags, and we of that: run as ``python -m tests.receiver.asked_options BASE OPTIONS``.

vLLM's configuration registers much in its process, so that is another one.
"""

import json
import sys
from typing import Any


def answer(base: str, asked: list[dict[str, Any]]) -> tuple[list[str], list[list[bool]]]:
    """What is said of each set of options, and whether each of its models is in a run by its names."""
    from vllm.config.utils import replace
    from vllm.engine.arg_utils import EngineArgs

    from vllm_delta_sync.engine.compat.features import check_features, fit_pause_mode
    from vllm_delta_sync.engine.entrypoints.load_format import is_in_run
    from vllm_delta_sync.errors import DeltaSyncError
    from vllm_delta_sync.settings import Settings

    answers, in_run = [], []
    for options in asked:
        settings = Settings(bucket="/run", pause_mode=options.pop("pause_mode", "keep"))
        config = EngineArgs(model=base, enforce_eager=True, max_model_len=64, **options).create_engine_config()
        try:
            check_features(config)
            fitted = fit_pause_mode(settings, config)
            answers.append("" if fitted == settings else f"pause_mode becomes {fitted.pause_mode}")
        except DeltaSyncError as error:
            answers.append(error.message)
        # Drafts are loaded with a configuration of their own, or with that of the served model.
        found = [is_in_run(config, config.model_config)]
        draft = getattr(config.speculative_config, "draft_model_config", None)
        if draft is not None:
            own = replace(config, model_config=draft, quant_config=None)
            found += [is_in_run(own, draft), is_in_run(config, draft)]
        in_run.append(found)
    return answers, in_run


if __name__ == "__main__":
    print("ANSWERS", json.dumps(answer(sys.argv[1], json.loads(sys.argv[2]))))
