"""Stores to test with: fsspec's memory, and S3 by moto's server if it is installed."""

import itertools

import pytest

from meshwright.remote import open_store

SETTINGS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
_names = itertools.count()


@pytest.fixture(scope="session")
def s3_server():
    """The endpoint of an S3 server on this machine, with a bucket."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys).create_bucket(Bucket="bucket")
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The settings of the server, in the environment."""
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["memory", "file", "s3"])
def url(request, tmp_path):
    """An empty place in a store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return f"{request.param}://bucket/test-{next(_names)}"


@pytest.fixture
def store(url):
    return open_store(url, writes=True)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
