"""The policy gradient: group-normalised advantages and a clipped ratio against the server's own log-probs."""

from dataclasses import dataclass

import torch

CLIP_LOW, CLIP_HIGH = 0.8, 1.28


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Reward minus the mean of its group, over the group's standard deviation; float32, same shape.

    ``rewards`` (n,) holds ``group`` answers to one prompt after another. A group whose answers all earned the
    same teaches nothing and gets zeros.
    """
    groups = rewards.view(-1, group)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, unbiased=False, keepdim=True) + 1e-6)).flatten()


@dataclass(frozen=True)
class Loss:
    """``value`` to differentiate, and what to show: the share of clipped tokens and the mean |log ratio|."""

    value: torch.Tensor
    clipped: float
    drift: float


def policy_loss(logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, answers: torch.Tensor) -> Loss:
    """Clipped policy-gradient loss, averaged over the tokens that the policy wrote.

    Args:
        logprobs: (n, length) float32 under the weights being trained, with gradient.
        sampled: (n, length) float32 as the server reported them when it sampled, under whatever version it
            served then: the ratio to them is the importance weight that makes up for that version's age.
        advantages: (n,) float32, one per sequence.
        answers: (n, length) bool, True where the policy wrote the next token.
    """
    count = answers.sum().clamp(min=1)
    log_ratio = torch.where(answers, logprobs - sampled, 0.0)
    ratio = log_ratio.exp()
    weight = advantages[:, None]
    surrogate = torch.minimum(ratio * weight, ratio.clamp(CLIP_LOW, CLIP_HIGH) * weight)
    value = -(surrogate * answers).sum() / count
    with torch.no_grad():
        blocked = ((ratio > CLIP_HIGH) & (weight > 0)) | ((ratio < CLIP_LOW) & (weight < 0))
        clipped = float((blocked & answers).sum() / count)
        drift = float(log_ratio.abs().sum() / count)
    return Loss(value, clipped, drift)
