"""Staging does not stay on the cores that a worker is pinned to."""

import json
import os
import subprocess
import sys

import pytest

CHILD = """
import json, os, time
from vllm_delta_sync.engine.background import Background
os.sched_setaffinity(0, {int(os.sys.argv[1])})
background = Background()
background.start("look", lambda: {"cores": sorted(os.sched_getaffinity(0))}, {})
while (outcome := background.poll())["running"]:
    time.sleep(0.01)
print(json.dumps([outcome["cores"], sorted(os.sched_getaffinity(0))]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system pins no threads")
def test_what_runs_in_the_background_leaves_the_cores_of_a_pinned_worker() -> None:
    cores = sorted(os.sched_getaffinity(0))
    told = subprocess.run(
        [sys.executable, "-c", CHILD, str(cores[0])], check=True, capture_output=True, text=True, timeout=120
    )
    staging, worker = json.loads(told.stdout)
    assert staging == cores, "it may run wherever the parent may"
    assert worker == cores[:1], "the worker stays where it was pinned"
