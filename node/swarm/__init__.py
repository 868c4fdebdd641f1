"""Exchange with other peers: rounds, state download, journal, shards. Knows training only through `Learner`."""
