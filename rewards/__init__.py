"""Rewards: scores of texts that are multiplied into the target as `exp(β·R)`."""

from guided_smc.rewards.base import Reward
from guided_smc.rewards.callable import reward
from guided_smc.rewards.scoring import Active, active

__all__ = ["Active", "Reward", "active", "reward"]
