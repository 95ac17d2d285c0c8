"""The CPU compatibility answers questions about the device, and only where there is no CUDA."""

import pytest
import torch

from titogym.trainer.backends.megatron import compat

pytestmark = pytest.mark.train
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")


@needs_no_cuda
def test_inside_the_scope_cuda_means_the_cpu():
    with compat.on_this_device():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2).cuda().tolist() == [1, 1]
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        assert torch.ones(2).type(torch.int64).dtype == torch.int64
    assert str(torch.cuda.current_device()) == "cpu"


@needs_no_cuda
def test_outside_the_scope_torch_is_untouched():
    assert torch.ones(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_nothing_is_done_where_cuda_exists(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    compat.install()
    assert torch.cuda.current_device is before
    with compat.on_this_device() as scope:
        assert scope is None
