"""An S3 server in a process of its own, and a wire to it that can be cut."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from verl_omni_core.store.places import folder_of

START_S, LIFETIME_S = 60, 3600
BUCKET = "runs"
ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def server() -> Iterator[str]:
    """Run moto's S3 server on loopback with one bucket, and give its ``host:port``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["timeout", str(LIFETIME_S), sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(port):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, f"the server did not start within {START_S} s"
            time.sleep(0.05)
        with mock.patch.dict(os.environ, ENVIRONMENT):
            client(f"127.0.0.1:{port}").create_bucket(Bucket=BUCKET)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def client(endpoint: str):
    """Return a client that does not go through the package."""
    import boto3

    return boto3.session.Session().client("s3", endpoint_url=f"http://{endpoint}", region_name="us-east-1")


def address(endpoint: str, prefix: str) -> str:
    """Return the address of a store on such a server."""
    return f"s3://{BUCKET}/{prefix}?endpoint_override={endpoint}&scheme=http"


def machine(home: Path, uri: str) -> Path:
    """Return the folder of a store as a machine has it whose home is ``home``."""
    with mock.patch.dict(os.environ, {"VERL_OMNI_HOME": str(home)}):
        return folder_of(uri)


class Wire:
    """Passes connections on to a server; one connection is one request."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.split(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.lost_requests = 0
        """Of the next so many requests nothing reaches the server."""
        self.lost_answers = 0
        """To the next so many requests that reach the server nothing comes back."""
        self.replaced: tuple[bytes, bytes] | None = None
        """Bytes of a request, and what of the same length the server gets instead."""
        self.requests = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Refuse all further connections."""
        with suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(connection,), daemon=True).start()

    def _pass(self, connection: socket.socket) -> None:
        self.requests += 1
        if self.lost_requests > 0:
            self.lost_requests -= 1
            connection.close()
            return
        with connection, socket.create_connection(self._server) as server:
            threading.Thread(target=self._forward, args=(connection, server), daemon=True).start()
            try:
                while data := server.recv(65536):
                    if self.lost_answers > 0 and not data.endswith(b"100 Continue\r\n\r\n"):
                        self.lost_answers -= 1
                        return
                    connection.sendall(data)
            except OSError:
                return
            finally:
                connection.shutdown(socket.SHUT_RDWR)  # the other thread still reads from it

    def _forward(self, connection: socket.socket, server: socket.socket) -> None:
        try:
            while data := connection.recv(65536):
                server.sendall(data.replace(*self.replaced) if self.replaced else data)
        except OSError:
            return


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
