"""Judges: models, servers and functions that say how good a completion is. Rewards for RLAIF; see `reward.py`."""
