"""Arrays on a device: on the CPU their own memory, and views of one buffer elsewhere (see test_fake_cuda)."""

from __future__ import annotations

import numpy as np
import torch

from pageturner.service.model.upload import upload


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    (tensor,) = upload((array,), torch.device("cpu"))
    assert (tensor.dtype, tensor.shape) == (torch.int32, (2, 3))
    assert tensor.data_ptr() == array.ctypes.data
