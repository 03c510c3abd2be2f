"""The weights that slime's own code was given when it wrote ``tests/trainer/slime_written``, see the README there."""

import torch

from tests.support.publishing import Tensors

VERSIONS = 4
STREAMS = ("xor-xxh3-128", "overwrite-blake3", "xor-adler32")
"""Folders there: encoding and checksum."""


def base_weights() -> Tensors:
    """Version 0, slime's ``--hf-checkpoint``."""
    values = (torch.arange(2400) * 7919 % 1009).float() / 1009 - 0.5  # the same bits on each machine
    return {
        "model.embed.weight": values[:1200].view(60, 20).bfloat16(),
        "model.layers.0.norm.weight": values[:20].clone(),
        "model.layers.0.packed": (values[:256] * 127).to(torch.int8).view(torch.uint8).view(16, 16),
        "model.layers.0.proj.weight": values.view(60, 40).bfloat16(),
        "model.layers.0.scale": values[:40].to(torch.float8_e4m3fn),
        "model.steps": torch.zeros(1, dtype=torch.int64),
    }


def weights_at(version: int) -> Tensors:
    """Of a version: few elements change, all of one tensor, a NaN and a −0.0, and nothing in version 3."""
    tensors = base_weights()
    if version >= 1:
        tensors["model.embed.weight"].view(-1)[7::31] += 0.25
        tensors["model.steps"] += 1
    if version >= 2:
        tensors["model.layers.0.proj.weight"] *= 1.25
        tensors["model.layers.0.packed"][3] ^= 0x55
        tensors["model.layers.0.norm.weight"][:2] = torch.tensor([float("nan"), -0.0])
    if version >= 4:
        tensors["model.embed.weight"] = base_weights()["model.embed.weight"]  # back to what it was
        tensors["model.layers.0.scale"][5] = 2.0
    return tensors
