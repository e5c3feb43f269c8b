"""What runs in the clients' environment is not collected here."""

collect_ignore_glob = ["peer_*.py"]
