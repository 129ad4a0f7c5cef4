"""Memory by whole pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pageturner.service.model.pages import own_pages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> set[str]:
    """Of the mapping that holds the address, as the system names them."""
    found: set[str] = set()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            found = set(line.split()[1:])
    return found


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no huge pages")
def test_huge_pages_are_asked_for_only_where_they_are_wanted() -> None:
    plain, huge = (own_pages((4 << 20,), torch.uint8, huge=huge) for huge in (False, True))
    assert "hg" not in flags_at(plain.data_ptr())
    assert "hg" in flags_at(huge.data_ptr())


def test_pages_hold_any_shape_and_dtype_and_nothing() -> None:
    tensor = own_pages((3, 5), torch.bfloat16, huge=True)
    tensor.fill_(2)
    assert tensor.dtype is torch.bfloat16
    assert float(tensor.sum()) == 30
    assert own_pages((0, 5), torch.float32).shape == (0, 5)
    with pytest.raises(MemoryError):
        own_pages((1 << 60,), torch.uint8)
