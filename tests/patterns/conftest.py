"""One thread for tiny tensors, and no structured trace: pytest would format and keep every record
of every compile.
"""

import logging

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _quiet_trace():
    trace = logging.getLogger("torch.__trace")
    saved, trace.disabled = trace.disabled, True
    yield
    trace.disabled = saved


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
