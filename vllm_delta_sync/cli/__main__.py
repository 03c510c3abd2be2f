"""``python -m vllm_delta_sync.cli``."""

import sys

from vllm_delta_sync.cli import main

sys.exit(main())
