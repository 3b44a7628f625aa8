"""Warnings about ports that strangers can use, and the mTLS of JAX's own service."""

import warnings

import jax
import pytest

from meshwright.distributed.address import Address
from meshwright.distributed.join import MTLS, _warn_if_open, has_mtls
from meshwright.errors import LaunchError, MeshwrightWarning

TOKEN = "a token of this test"


def warned(host, bound, token):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _warn_if_open(Address(host, 1234), bound, 2, token)
    assert all(one.category is MeshwrightWarning for one in caught)
    return [str(one.message) for one in caught]


def test_a_loopback_address_needs_no_warning():
    assert warned("127.0.0.1", "127.0.0.1:1234", None) == []
    assert warned("localhost", "127.0.0.1:1234", None) == []
    assert warned("::1", "[::1]:1234", TOKEN) == []


def test_an_open_address_is_reported():
    without, jax_service = warned("10.0.0.7", "10.0.0.7:1234", None)
    assert "at 10.0.0.7:1234 has no token: anybody who reaches the port could join" in without
    assert "hint: set MESHWRIGHT_TOKEN to the same secret for every process." in without
    assert "JAX's coordination service at 10.0.0.7:1234 is neither authenticated nor encrypted" in jax_service
    assert warned("10.0.0.7", "10.0.0.7:1234", TOKEN) == [jax_service]
    assert len(warned("node7", "0.0.0.0:1234", None)) == 2


def test_a_name_that_others_cannot_reach_is_reported():
    (text,) = warned("node7", "127.0.1.1:1234", TOKEN)
    assert "node7 is 127.0.1.1 on the machine of rank 0, so only processes on that machine can join" in text


def test_mtls_is_used_if_jax_has_it_and_an_error_if_not(monkeypatch):
    if hasattr(jax.config, "jax_mtls_cert_file"):
        jax.config.update("jax_mtls_cert_file", "cert.pem")
        try:
            assert has_mtls()
            assert warned("10.0.0.7", "10.0.0.7:1234", TOKEN) == []
        finally:
            jax.config.update("jax_mtls_cert_file", None)
        return
    monkeypatch.setenv(MTLS[0], "cert.pem")
    with pytest.raises(LaunchError, match=r"JAX_MTLS_CERT_FILE is set, but jax .* has no mTLS"):
        has_mtls()
