"""How a node is seen from outside: structured logs, progress, the local control socket."""
