"""One thread for tiny tensors, and nothing compiled is left behind."""

import os
from contextlib import nullcontext

import pytest
import torch
import without_dynamo as directly


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.fixture
def without_dynamo():
    """For files whose tests are about the graph and not about how it was traced.

    With TESTS_WITH_DYNAMO=1 in the environment they go through Dynamo all the same.
    """
    wants_dynamo = os.environ.get("TESTS_WITH_DYNAMO") == "1"
    with nullcontext() if wants_dynamo else directly.chosen():
        yield
