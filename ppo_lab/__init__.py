"""ppo_lab."""
