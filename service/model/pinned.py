"""Memory of the host that a GPU reads and writes by itself."""

from __future__ import annotations

import torch


class Pinned:
    """A tensor of the host whose pages a GPU may read and write by itself, until this is closed.

    Pinned where it lies: torch's own allocator would round gigabytes up to the next power of two. Raises
    MemoryError if the machine refuses.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address: int | None = None
        if not tensor.numel():
            return
        self._cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch leaves it so
        status = int(self._cuda.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        if status:
            raise MemoryError(f"{tensor.nbytes} bytes of the host cannot be pinned (CUDA error {status})")
        self._address = tensor.data_ptr()

    def close(self) -> None:
        """Unpin it; a GPU must not read or write it by itself afterwards. Closing twice is no error."""
        if self._address is not None:
            self._cuda.cudaHostUnregister(self._address)
            self._address = None
