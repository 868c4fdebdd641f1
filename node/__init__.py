"""One peer: it learns, exchanges, and survives."""
