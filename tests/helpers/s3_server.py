"""A local server of S3 (moto) behind a proxy that plants faults, in the environment of `make test-cloud`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.helpers.faulty_proxy import Proxy, faulty_proxy

SECRET = "secret-of-the-test"


@contextmanager
def s3_server() -> Iterator[Proxy]:
    """Yield the proxy before a server of S3, to which the environment leads."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    # The clients of an earlier server.
    S3FileSystem.clear_instance_cache()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        with faulty_proxy(server.get_host_and_port()[1]) as proxy:
            os.environ |= {
                "AWS_ENDPOINT_URL": proxy.url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            yield proxy
    finally:
        server.stop()


def make_bucket(name: str) -> str:
    """Make an empty bucket, and return its URL."""
    s3 = client()
    with suppress(s3.exceptions.BucketAlreadyOwnedByYou):
        s3.create_bucket(Bucket=name)
    for entry in list_keys(name):
        s3.delete_object(Bucket=name, Key=entry)
    return f"s3://{name}"


def list_keys(bucket: str) -> list[str]:
    """Return the names of all objects of a bucket."""
    return [entry["Key"] for entry in client().list_objects_v2(Bucket=bucket).get("Contents", [])]


def client() -> Any:
    """Return a client of the server."""
    import boto3

    return boto3.client("s3")
