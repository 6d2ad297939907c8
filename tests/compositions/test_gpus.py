"""FSDP2 and tensor parallel train as stock does, with real kernels: on two GPUs where there are
two, else both ranks on one."""

import pytest
import torch
from ranks import two_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.distributed.is_available(), reason="torch is built without distributed"
    ),
]


@pytest.fixture(scope="module", params=["fsdp2", "tensor parallel"])
def ranks(request, tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("ranks")
    return request.param, two_ranks("train_on_gpus.py", folder, request.param, timeout=400)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_steps(ranks, dtype):
    form, both = ranks
    for found in (rank[dtype] for rank in both):
        assert "error" not in found, found["error"]
        assert found["left"] == []
        # Layers that are compiled one by one share their code.
        assert found["fused"] == found["backward"] == (1 if form == "fsdp2" else 2)
        assert found["wrong"] == []
        first, last = found["losses"]
        assert last < first - 0.01  # it has learned
