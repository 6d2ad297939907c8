"""DDP, FSDP2 and tensor parallel on two ranks: each rank's graph holds local tensors, which fuse as
they do alone."""

import pytest
import torch
from ranks import two_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch is built without distributed"
)

# Forward and backward ops in the graphs of one rank: with checkpointing, a forward runs again.
EXPECTED = {
    "ddp": (2, 2),
    "ddp with checkpointing": (4, 2),
    "replicate": (2, 2),
    "fsdp2": (2, 2),
    "fsdp2 with checkpointing": (2, 2),  # eager checkpointing runs the compiled layer again
    "tensor parallel": (1, 1),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks("two_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", EXPECTED)
def test_two_ranks(ranks, name):
    for found in (rank[name] for rank in ranks):
        assert "error" not in found, found["error"]
        assert found["left"] == []
        assert found["wrong"] == []
        assert (found["forward"], found["backward"]) == EXPECTED[name]
