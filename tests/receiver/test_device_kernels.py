"""Kernels for GPUs, without a GPU: run under Triton's interpreter, and compiled.

Triton is not in the environment of the tests, where vLLM would find it, but beside it, for processes of its own.
"""

import os
from pathlib import Path

import pytest

from tests.support.running import ROOT, run_python

TRITON = ROOT / ".venv" / "triton"


def run_with_triton(module: str, **environment: str) -> str:
    """What a program prints."""
    assert (TRITON / "triton").is_dir(), f"{TRITON} is missing; make test installs Triton there"
    return run_python(
        "-m", module, environment={"PYTHONPATH": f"{TRITON}{os.pathsep}{ROOT}", **environment}, seconds=900
    ).stdout


@pytest.mark.parametrize(
    "program",
    [
        "interpreted_commit",
        pytest.param("interpreted_decode", marks=pytest.mark.slow),
        pytest.param("interpreted_diff", marks=pytest.mark.slow),
        pytest.param("interpreted_fingerprint", marks=pytest.mark.slow),
        pytest.param("interpreted_staging", marks=pytest.mark.slow),
    ],
)
def test_kernels_compute_what_a_cpu_computes(program: str) -> None:
    assert run_with_triton(f"tests.tools.{program}", TRITON_INTERPRET="1") == "equal\n"


@pytest.mark.slow
def test_kernels_compile_and_take_no_more_registers_than_the_document_says(tmp_path: Path) -> None:
    run_with_triton("tests.tools.device_kernels", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
