"""The network in one process: virtual time, links and faults around the real node code."""
