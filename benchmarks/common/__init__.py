"""What the benchmarks share. Nothing here imports more than the standard library, torch and safetensors, but for `ours.py` and
`peer.py` (and those of `xlnet.py`), each of which runs in its own process, the latter in an environment of its own.
"""
