"""What counts as an address."""

from __future__ import annotations

import pytest

from pageturner.loadtest.address import check_address
from pageturner.loadtest.errors import OptionError


@pytest.mark.fault("36")
@pytest.mark.parametrize(
    "address", ["host:1", "127.0.0.1:65535", "[::1]:50051", "unix:pt.sock", "unix:///tmp/s", "dns:///h:1"]
)
def test_an_address_that_grpc_takes_is_taken(address: str) -> None:
    assert check_address("target", address) == address


@pytest.mark.parametrize("host", ["localhost", "10.0.0.1", "[::1]"])
def test_a_port_left_out_is_that_of_the_service(host: str) -> None:
    assert check_address("target", host) == f"{host}:50051"


@pytest.mark.fault("K")
@pytest.mark.parametrize(
    "address", ["", "host:", ":1", "host:0", "host:65536", "host:x", "::1:50051", "unix:", "http://host:1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(OptionError, match="--target: "):
        check_address("target", address)
