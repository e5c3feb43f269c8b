"""What runs in a peer's environment is not collected here."""

collect_ignore_glob = ["make_goldens_*.py", "peer_*.py", "golden_writer.py"]
