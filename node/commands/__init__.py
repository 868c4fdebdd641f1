"""What the `shoal` commands do; `node/cli.py` has their flags and help."""
