"""What peers say to each other: identity, versions, ballots, membership, admission and the wire. No torch, no training."""
