"""Policy losses over `token_logprobs`, in plain torch: examples that work, not a framework."""

from cce_dist.rl.losses import PolicyLoss, dapo_loss, grpo_loss, ppo_loss
from cce_dist.rl.rollouts import group_advantages, two_model_logprobs

__all__ = [
    "PolicyLoss",
    "dapo_loss",
    "group_advantages",
    "grpo_loss",
    "ppo_loss",
    "two_model_logprobs",
]
