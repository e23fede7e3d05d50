"""Rewards: scorers of responses and the KL penalty."""
