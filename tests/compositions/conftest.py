"""Compiles leave nothing behind: settings, compiled frames and the number of threads are as
before."""

import pytest
import torch
import torch._inductor.config as inductor_config


@pytest.fixture(autouse=True)
def _as_before():
    torch.manual_seed(0)
    saved, threads = inductor_config.joint_custom_pre_pass, torch.get_num_threads()
    torch.set_num_threads(1)
    inductor_config.joint_custom_pre_pass = None
    torch._dynamo.reset()
    yield
    inductor_config.joint_custom_pre_pass = saved
    torch.set_num_threads(threads)
    torch._dynamo.reset()
