"""The off-policy gradient: importance weights against the log-probs that each token was sampled with, truncated."""

from dataclasses import dataclass

import torch

TRUNCATION = 2.0
"""Largest importance weight of a token. A weight is never negative, so one side is bounded already."""


@dataclass(frozen=True)
class Loss:
    """``value`` to differentiate; what to show: the share of truncated tokens, and the mean |log ratio| by age.

    ``drift``: age in versions → mean |log-prob now - log-prob when sampled| over the tokens of that age.
    """

    value: torch.Tensor
    truncated: float
    drift: dict[int, float]


def off_policy_loss(
    logprobs: torch.Tensor,
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    answers: torch.Tensor,
    ages: torch.Tensor,
    truncation: float = TRUNCATION,
) -> Loss:
    """Policy-gradient loss of tokens that older versions sampled, averaged over the tokens that the policy wrote.

    Every token's gradient is weighted by what the policy gives it now over what the version of its span gave it then,
    at most ``truncation``: unbiased where no weight is cut, and of bounded variance. Of age 0 the weight is 1.

    Args:
        logprobs: (n, length) float32 under the weights being trained, with gradient.
        sampled: (n, length) float32 as recorded when the token was sampled.
        advantages: (n,) float32, one per sequence.
        answers: (n, length) bool, True where the policy wrote the next token.
        ages: (n, length) int64, versions between the one that sampled the token and the one being trained.
    """
    count = answers.sum().clamp(min=1)
    log_ratio = torch.where(answers, logprobs.detach() - sampled, 0.0)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=truncation) * advantages[:, None]
    value = -(torch.where(answers, logprobs, 0.0) * weight).sum() / count
    drift = {int(age): float(log_ratio[answers & (ages == age)].abs().mean()) for age in ages[answers].unique()}
    return Loss(value, float(((ratio > truncation) & answers).sum() / count), drift)
