"""What the benchmarks share. Processes of a peer run in its environment, so `wire`, `machine`, `side` and `peer` import nothing
of transformer_xl but within functions that ours call.
"""
