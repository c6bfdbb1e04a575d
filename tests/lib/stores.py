"""Servers of object stores on this host, as the packages of s3://, gs:// and hf:// find them."""

from __future__ import annotations

import contextlib
import logging
import math
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lib.hub_server import HubServer, hub_server

STORES = ["memory", *(pytest.param(name, marks=pytest.mark.soak) for name in ("s3", "gs", "hf"))]
"""Values of the fixture `store`: protocols of which tests in `make test` use that without a server."""


@contextlib.contextmanager
def s3_server() -> Iterator[Any]:
    """Serve S3, with a bucket "bucket"; yield the server. Skips the test without the packages."""
    for module in ("s3fs", "moto", "flask"):
        pytest.importorskip(module)
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    accept(server, math.inf)
    host, port = server.get_host_and_port()
    values = {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "AKIAKEY", "SECRET_ACCESS_KEY": "hush"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**values, "DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(f"AWS_{name}", value)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).makedirs("bucket", exist_ok=True)
        yield server
    server.stop()


def accept(server: Any, requests: float) -> None:
    """Let a server of S3 examine credentials, of which it knows none, after some number of requests."""
    host, port = server.get_host_and_port()
    url, headers = f"http://{host}:{port}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, str(requests).encode(), headers)).close()


@contextlib.contextmanager
def gs_server() -> Iterator[None]:
    """Serve the API of Google Cloud Storage, with a bucket "bucket". Skips the test without the packages."""
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")

    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    port = server._api._httpd.server_port
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield
    server.stop()


@contextlib.contextmanager
def open_store(protocol: str) -> Iterator[str]:
    """Yield the address of an empty directory of a protocol, one of STORES."""
    servers = {"s3": s3_server, "gs": gs_server, "hf": hub_server}
    name = f"bucket/{uuid.uuid4()}"
    with servers.get(protocol, contextlib.nullcontext)() as server:
        if isinstance(server, HubServer):
            server.repositories[name := name.replace("bucket", "me")] = {}
        yield f"{protocol}://{name}"
