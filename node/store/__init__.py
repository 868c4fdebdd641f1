"""What a node keeps on disk: checkpoints, the journal of its own updates, its locked data directory."""
