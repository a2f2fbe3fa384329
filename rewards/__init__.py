"""Rewards: scores of texts that are multiplied into the target as `exp(β·R)`."""

from guided_smc.rewards.callable import Reward, reward

__all__ = ["Reward", "reward"]
