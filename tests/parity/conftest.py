"""What runs in a peer's environment is not collected here; and checkpoints that several tests read, converted once."""

import pytest

from tests.parity.reading import Convert, converting

collect_ignore_glob = ["make_goldens_*.py", "peer_*.py", "golden_writer.py"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    return converting(tmp_path_factory.mktemp("converted"))
