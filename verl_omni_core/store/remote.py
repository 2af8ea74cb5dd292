"""A prefix in a bucket of an object store, as the durable tier of runs.

Files travel through ``pyarrow.fs``. It cannot create an object only if there is none, so that, and what else is small,
goes through boto3: both are AWS clients, with the same credentials, configuration files and variables.
"""

import logging
import os
import random
import re
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.store.durable_files import storage_errors

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long an operation is tried again while the store does not answer."""
CONNECT_S, REQUEST_S = 5.0, 30.0
PAGE = 1000
"""Names that one answer lists."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CHUNK_BYTES = 8 << 20
_OPTIONS = ("endpoint_override", "scheme", "region")
_EXAMPLE = "s3://bucket/prefix, or s3://bucket/prefix?endpoint_override=127.0.0.1:9000&scheme=http for another server"
_AGAIN = {"SlowDown", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted", "Throttling", "RequestLimit"}
_FINAL = re.compile(
    r"ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID"
    r"|HTTP status 4(?!08|09|29)"
)
Answer = TypeVar("Answer")


class _NoAnswer(Exception):
    """The store may answer if it is asked again."""


class _Refused(Exception):
    """The store would refuse it again."""


@dataclass(frozen=True)
class Remote:
    """Objects under a prefix. Plain values: it can be sent to other processes and shared by threads."""

    bucket: str
    prefix: str
    endpoint: str | None = None
    """``host:port`` of a server that is not AWS's."""
    scheme: str = "https"
    region: str | None = None
    patience_s: float = PATIENCE_S
    """Seconds for which an operation is tried again; 0: once."""

    @classmethod
    def parse(cls, uri: str) -> "Remote":
        """Return what ``s3://bucket/prefix`` names, options in the query as in ``pyarrow.fs``.

        Raises:
            ConfigError: another scheme, no bucket, unknown options, or credentials, which do not belong there.
        """
        parts = urllib.parse.urlsplit(uri)
        if parts.scheme != "s3":
            raise ConfigError(f"store {uri!r} has scheme {parts.scheme!r}; stores are folders, or {_EXAMPLE}")
        options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        if "@" in parts.netloc or {"access_key", "secret_key", "session_token"} & options.keys():
            raise ConfigError(
                f"a store's address holds credentials (bucket {parts.hostname!r}); settings are saved and shown, so "
                "give them in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in ~/.aws"
            )
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown or not parts.netloc or parts.fragment or options.get("scheme", "https") not in ("http", "https"):
            raise ConfigError(
                f"store {uri!r} is no address of one: expected {_EXAMPLE}; options: {', '.join(_OPTIONS)}"
            )
        names = [name for name in parts.path.split("/") if name]
        if ".." in names or "." in names:
            raise ConfigError(f"store {uri!r} has '.' or '..' in its path; expected {_EXAMPLE}")
        endpoint, scheme = options.get("endpoint_override"), options.get("scheme", "https")
        return cls(parts.netloc, "/".join(names), endpoint, scheme, options.get("region"))

    @property
    def uri(self) -> str:
        """The address that :meth:`parse` reads."""
        values = {"endpoint_override": self.endpoint, "scheme": self.scheme, "region": self.region}
        given = {name: value for name, value in values.items() if value and (name, value) != ("scheme", "https")}
        query = urllib.parse.urlencode(given, safe=":")
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/") + (f"?{query}" if query else "")

    def within(self, name: str) -> "Remote":
        """Return the prefix ``name`` below this one."""
        return replace(self, prefix=self._key(name))

    def impatient(self, seconds: float = 0.0) -> "Remote":
        """Return the same place, where nothing is waited for longer than this."""
        return replace(self, patience_s=seconds)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object only if there is none, and say whether it is this one.

        It is too if an earlier try of the same creation succeeded and its answer was lost.

        Raises:
            StoreError: the store does not answer, refuses, or cannot create conditionally.
        """
        while True:
            done = self._ask(
                f"create {name}",
                lambda client, key: client.put_object(Bucket=self.bucket, Key=key, Body=data, IfNoneMatch="*"),
                name,
                otherwise={"PreconditionFailed": None},
            )
            if done is not None:
                return True
            present = self.read(name)
            if present is not None:  # else it was deleted in between
                return present == data

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object."""
        self._ask(f"write {name}", lambda client, key: client.put_object(Bucket=self.bucket, Key=key, Body=data), name)

    def read(self, name: str) -> bytes | None:
        """Return an object's content; none if there is none."""
        found = self.read_with_age(name)
        return None if found is None else found[0]

    def read_with_age(self, name: str) -> tuple[bytes, float] | None:
        """Return an object's content and the seconds since it was written, both by the server's clock."""

        def get(client: Any, key: str) -> tuple[bytes, float]:
            answer = client.get_object(Bucket=self.bucket, Key=key)
            now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
            return answer["Body"].read(), (now - answer["LastModified"]).total_seconds()

        return self._ask(f"read {name}", get, name, otherwise={"NoSuchKey": None, "404": None})

    def names(self, folder: str = "") -> list[str]:
        """Return the names directly below ``folder``, of objects and of further prefixes, in order."""
        return [name.rstrip("/") for name in self._listed(folder, "/")]

    def files(self, folder: str = "") -> list[str]:
        """Return the names of all objects below ``folder``, relative to it, in order."""
        return list(self._listed(folder, ""))

    def upload(self, name: str, path: Path) -> None:
        """Write a local file as an object, which appears once all of it is there."""
        files, key = self._files(), f"{self.bucket}/{self._key(name)}"

        def once() -> None:
            # what is refused only when the object is closed would be lost by fs.copy_files
            with path.open("rb") as source, _answered(), files.open_output_stream(key) as sink:
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)

        self._until_it_answers(f"upload {name}", once)

    def download(self, name: str, path: Path) -> bool:
        """Write an object as a local file, which appears whole; false if there is no such object."""
        files, key = self._files(), f"{self.bucket}/{self._key(name)}"
        temporary = path.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}-{path.name}"[:200])

        def once() -> bool:
            with temporary.open("wb") as sink, _answered():
                try:
                    with files.open_input_stream(key) as source:
                        shutil.copyfileobj(source, sink, _CHUNK_BYTES)
                except FileNotFoundError:
                    return False
            return True

        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                found = self._until_it_answers(f"download {name}", once)
                if found:
                    temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        return found

    def delete(self, name: str) -> None:
        """Delete an object; harmless if there is none."""
        self._ask(f"delete {name}", lambda client, key: client.delete_object(Bucket=self.bucket, Key=key), name)

    def delete_below(self, folder: str) -> None:
        """Delete all objects below ``folder``, which must not be empty."""
        if not folder.strip("/"):
            raise StoreError("no folder was given whose objects are to be deleted; a whole store is never deleted")
        for name in self.files(folder):
            self.delete(f"{folder}/{name}")

    def check(self) -> None:
        """Check that the bucket answers.

        Raises:
            ConfigError: no credentials, or the package that objects are written with is missing. StoreError: no answer.
        """
        self._ask("list", lambda client, key: client.list_objects_v2(Bucket=self.bucket, Prefix=key, MaxKeys=1), "")

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self.prefix, name.strip("/")) if part)

    def _listed(self, folder: str, delimiter: str) -> Iterator[str]:
        prefix = f"{self._key(folder)}/".lstrip("/")
        token: dict[str, str] = {}
        while True:
            page = self._ask(
                f"list {folder}",
                lambda client, _: client.list_objects_v2(
                    Bucket=self.bucket,
                    Prefix=prefix,
                    Delimiter=delimiter,
                    MaxKeys=PAGE,
                    **token,  # noqa: B023 - called at once
                ),
                folder,
            )
            found = [entry["Key"] for entry in page.get("Contents", ())]
            found += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
            yield from sorted(name.removeprefix(prefix) for name in found if name != prefix)
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _ask(
        self, what: str, act: Callable[[Any, str], Any], name: str, otherwise: dict[str, Any] | None = None
    ) -> Any:
        """Ask through boto3; ``otherwise``: answers to error codes that are no fault."""
        client = _client(os.getpid(), self.endpoint, self.scheme, self.region)
        from botocore import exceptions

        def once() -> Any:
            try:
                return act(client, self._key(name))
            except exceptions.ClientError as error:
                code = str(error.response.get("Error", {}).get("Code"))
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                if otherwise and code in otherwise:
                    return otherwise[code]
                if code in _AGAIN or (status >= 500 and status != 501) or status == 429:
                    raise _NoAnswer(str(error)) from error
                raise StoreError(f"cannot {what} in {self.uri}: {error}; {_advice(code, status)}") from error
            except (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError) as error:
                raise _NoAnswer(str(error)) from error
            except exceptions.BotoCoreError as error:
                raise ConfigError(f"cannot {what} in {self.uri}: {error}; correct the AWS configuration") from error

        return self._until_it_answers(what, once)

    def _files(self) -> Any:
        return _file_system(os.getpid(), self.endpoint, self.scheme, self.region)

    def _until_it_answers(self, what: str, once: Callable[[], Answer]) -> Answer:
        deadline, pause = time.monotonic() + self.patience_s, _PAUSE_S
        while True:
            try:
                return once()
            except _Refused as error:
                raise StoreError(f"cannot {what} in {self.uri}: {error}; {_advice('', 0)}") from error
            except _NoAnswer as error:
                wait = pause * random.uniform(0.5, 1.0)
                if time.monotonic() + wait > deadline:
                    raise StoreError(
                        f"cannot {what} in {self.uri}: no answer within {self.patience_s:.0f} s ({error}); check the "
                        "network and the server, then start again: what is committed is kept"
                    ) from error
                logger.warning("%s: %s is tried again: %s", self.uri, what, error)
                time.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE_S)


@contextmanager
def _answered() -> Iterator[None]:
    """Tell what Arrow's file system raises apart: refusals, silence, and errors of the disk, which pass."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not isinstance(error, TimeoutError):
            raise
        raise (_Refused if _FINAL.search(str(error)) else _NoAnswer)(str(error)) from error


def _advice(code: str, status: int) -> str:
    if status == 501 or code == "NotImplemented":
        return "its server cannot create objects conditionally (If-None-Match), which a run's safety needs"
    if code == "NoSuchBucket":
        return "make the bucket first; none is made here"
    return "check the bucket's name, the credentials and what they allow: list, read, write and delete"


@lru_cache(maxsize=16)
def _client(pid: int, endpoint: str | None, scheme: str, region: str | None) -> Any:
    """Return boto3's client; one for each process, as a forked one must not share connections."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError(
            "stores in an object store need boto3, which is not installed; pip install 'verl-omni-flows[objects]'"
        ) from error
    session = boto3.session.Session()
    if session.get_credentials() is None:
        raise ConfigError(
            "no credentials for the object store; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or set up ~/.aws; "
            "what Ray starts has the environment that Ray was started with: verl-omni down, then start again"
        )
    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=REQUEST_S,
        retries={"total_max_attempts": 1},  # tried again above, where a lost answer is understood
        max_pool_connections=32,
        request_checksum_calculation="when_required",  # other servers than AWS's do not know the newer ones
    )
    place = {} if endpoint is None else {"endpoint_url": f"{scheme}://{endpoint}"}
    return session.client("s3", region_name=_region(region), config=config, **place)


@lru_cache(maxsize=16)
def _file_system(pid: int, endpoint: str | None, scheme: str, region: str | None) -> Any:
    from pyarrow import fs

    return fs.S3FileSystem(
        endpoint_override=endpoint,
        scheme=scheme,
        region=_region(region),
        connect_timeout=CONNECT_S,
        request_timeout=REQUEST_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        allow_delayed_open=True,  # what is small goes in one request
    )


def _region(region: str | None) -> str:
    if region is None:
        import boto3

        region = boto3.session.Session().region_name
    return region or "us-east-1"
