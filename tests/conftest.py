import pytest
import torch
from torch.nn.modules import module as modules


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No global hook and no torch function mode outlives a test."""
    before = len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)
    yield
    assert (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)) == before
    assert torch.overrides._get_current_function_mode_stack() == []
