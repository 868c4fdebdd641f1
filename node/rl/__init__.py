"""Reinforcement learning inside one node: models, tasks, rewards, losses and the learners."""
