"""Objects are created once, whatever the network loses, and every refusal says what to do."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.object_store import Wire, address, client
from tests.unit.store.processes import LIMIT_S, REPOSITORY
from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.store.remote import Remote


@pytest.fixture
def remote(uri) -> Remote:
    return Remote.parse(uri)


@pytest.fixture
def wire(endpoint, aws):
    made = Wire(endpoint)
    yield made
    made.close()


def through(wire: Wire, remote: Remote) -> Remote:
    return replace(remote, endpoint=wire.endpoint)


def test_the_server_of_the_tests_honours_conditional_creation(endpoint, aws):
    s3 = client(endpoint)
    s3.put_object(Bucket="runs", Key="probe", Body=b"1", IfNoneMatch="*")
    with pytest.raises(s3.exceptions.ClientError, match="PreconditionFailed"):
        s3.put_object(Bucket="runs", Key="probe", Body=b"2", IfNoneMatch="*")
    assert s3.get_object(Bucket="runs", Key="probe")["Body"].read() == b"1"


def test_an_object_is_created_once_and_its_creator_may_ask_again(remote):
    assert remote.create("a/b", b"mine")
    assert not remote.create("a/b", b"another")
    assert remote.create("a/b", b"mine")
    assert remote.read("a/b") == b"mine"


def test_of_threads_that_create_one_object_exactly_one_wins(remote):
    for turn in range(5):
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(lambda n: remote.create(f"race/{turn}", b"%d" % n), range(6)))  # noqa: B023
        assert sum(won) == 1 and remote.read(f"race/{turn}") == b"%d" % won.index(True)


def test_a_creation_whose_answer_was_lost_is_recognised_as_ones_own(remote, wire):
    wire.lost_answers = 1
    assert through(wire, remote).create("once", b"mine")
    assert wire.lost_answers == 0 and wire.requests >= 2
    assert remote.read("once") == b"mine"
    assert not through(wire, remote).create("once", b"another")


def test_a_creation_whose_answer_was_lost_does_not_claim_the_object_of_another(remote, wire):
    remote.create("taken", b"another")
    wire.lost_answers = 1
    assert not through(wire, remote).create("taken", b"mine")
    assert remote.read("taken") == b"another"


def test_lost_requests_are_made_again_until_the_store_answers(remote, wire, tmp_path):
    far = through(wire, remote)
    wire.lost_requests = 2
    far.put("small", b"x")
    (tmp_path / "file").write_bytes(b"y" * 100_000)
    wire.lost_requests = 2
    far.upload("large", tmp_path / "file")
    wire.lost_requests = 2
    assert far.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"y" * 100_000
    assert wire.lost_requests == 0 and remote.read("small") == b"x"


def test_a_store_that_does_not_answer_is_given_up_at_the_deadline(remote, wire, tmp_path):
    wire.close()
    (tmp_path / "file").write_bytes(b"x")
    far = through(wire, remote).impatient(1.0)
    for act in (lambda: far.read("a"), lambda: far.upload("a", tmp_path / "file"), lambda: far.create("a", b"")):
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"no answer within 1 s .*start again: what is committed is kept"):
            act()
        assert time.monotonic() - began < 10


def test_names_and_files_are_listed_below_their_prefix_alone(remote):
    for name in ("steps/1/x", "steps/1/y/z", "steps/2/x", "stepsother", "a"):
        remote.put(name, b"")
    assert remote.names() == ["a", "steps", "stepsother"]
    assert remote.names("steps") == ["1", "2"]
    assert remote.files("steps") == ["1/x", "1/y/z", "2/x"]
    assert remote.within("steps").files("1") == ["x", "y/z"]
    assert remote.names("none") == []
    remote.delete_below("steps")
    assert remote.files() == ["a", "stepsother"]
    with pytest.raises(StoreError, match=r"a whole store is never deleted"):
        remote.delete_below("")


def test_names_that_would_leave_the_folder_of_copies_are_refused(remote, endpoint):
    client(endpoint).put_object(Bucket=remote.bucket, Key=f"{remote.prefix}/a/../../outside.json", Body=b"x")
    with pytest.raises(StoreError, match=r"would leave its folder"):
        remote.files()


def test_objects_that_only_show_a_folder_are_no_files(remote, endpoint):
    client(endpoint).put_object(Bucket=remote.bucket, Key=f"{remote.prefix}/steps/000001/", Body=b"")
    remote.put("steps/000001/x", b"x")
    assert remote.files() == ["steps/000001/x"] and remote.names("steps") == ["000001"]


def test_a_listing_has_more_names_than_fit_into_one_answer(remote, monkeypatch):
    monkeypatch.setattr("verl_omni_core.store.remote.PAGE", 4)
    for number in range(10):
        remote.put(f"many/{number}", b"")
        remote.put(f"many/{number}.folder/x", b"")
    assert remote.names("many") == [name for n in range(10) for name in (f"{n}", f"{n}.folder")]
    assert len(remote.files()) == 20


def test_files_come_back_as_they_were_and_absent_ones_leave_nothing(remote, tmp_path):
    for size in (0, 1, 17_000_000):
        content = os.urandom(size)
        (tmp_path / "there").write_bytes(content)
        remote.upload("file", tmp_path / "there")
        assert remote.download("file", tmp_path / "deep" / "back")
        assert (tmp_path / "deep" / "back").read_bytes() == content
    assert not remote.download("none", tmp_path / "none" / "x")
    assert list((tmp_path / "none").iterdir()) == []


def test_ages_are_told_by_the_clock_of_the_store(remote):
    remote.put("a", b"x")
    data, age = remote.read_with_age("a")
    assert data == b"x" and 0 <= age < LIMIT_S
    assert remote.read_with_age("none") is None


@pytest.mark.parametrize(
    "uri",
    ["s3://b/p", "s3://b", "s3://b/p/q?endpoint_override=127.0.0.1:9&scheme=http", "s3://b/p?region=eu-central-1"],
)
def test_an_address_names_its_place_whole(uri):
    remote = Remote.parse(uri)
    assert remote.uri == uri and Remote.parse(remote.uri) == remote
    assert Remote.parse(uri.replace("/p", "//p/")) == remote  # one place, one cache


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("gs://b/p", r"scheme 'gs'; stores are folders, or s3://bucket/prefix"),
        ("s3:///p", r"no address .*expected s3://bucket/prefix"),
        ("s3://b/p?retries=3", r"options: endpoint_override, scheme, region"),
        ("s3://b/p?scheme=ftp", r"no address"),
        ("s3://b/../p", r"'\.\.' in its path"),
        ("s3://key:word@b/p", r"credentials .*environment"),
        ("s3://b/p?access_key=key&secret_key=word", r"credentials .*environment"),
    ],
)
def test_an_address_that_is_none_is_refused_and_credentials_are_not_repeated(uri, said):
    with pytest.raises(ConfigError, match=said) as refused:
        Remote.parse(uri)
    assert "word" not in str(refused.value)


def test_a_bucket_that_does_not_exist_is_named_and_not_waited_for(remote, tmp_path):
    elsewhere = replace(remote, bucket="nowhere")
    (tmp_path / "file").write_bytes(b"x")
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"s3://nowhere.*make the bucket first"):
        elsewhere.check()
    with pytest.raises(StoreError, match=r"NO_SUCH_BUCKET"):
        elsewhere.upload("file", tmp_path / "file")
    assert time.monotonic() - began < 10


LOST = """
import sys
{prepare}
from verl_omni_core.store.remote import Remote
try:
    Remote.parse({uri!r}).check()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("prepare", "environment", "said"),
    [
        (
            "sys.modules['boto3'] = None",
            {},
            "ConfigError stores in an object store need boto3.*verl-omni-flows.objects",
        ),
        ("", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "ConfigError no credentials.*AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_the_machine_lacks_for_object_stores_is_named(uri, prepare, environment, said):
    program = LOST.format(prepare=prepare, uri=uri)
    env = {**os.environ, **environment, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert re.search(said, done.stdout), done


def test_the_address_helper_of_the_tests_is_what_users_write(endpoint):
    assert Remote.parse(address(endpoint, "p")).endpoint == endpoint
