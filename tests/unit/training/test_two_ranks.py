"""FSDP2 on two real processes (gloo) against one: gradients, parameters, skips, adapters and checkpoints."""

from datetime import timedelta

import psutil
import pytest
import torch

from tests.unit.training import programs, tiny
from tests.unit.training.spawn import run_ranks
from verl_omni_core.training import ranks
from verl_omni_core.training.ranks import Ranks


def test_the_ranks_meet_on_the_given_address_alone():
    store, port = ranks.open_rendezvous("127.0.0.1", 30)
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    other = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    other.set("seen", "yes")
    assert store.get("seen") == b"yes"


def test_ranks_of_one_machine_listen_on_loopback_alone(two):
    assert two[0]["listening"] and two[1]["listening"]
    assert {ip.removeprefix("::ffff:") for found in two for ip in found["listening"]} == {"127.0.0.1"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(one, pipeline, checkpoints):
    return run_ranks(
        "everything", 2, checkpoints / "run", pipeline=str(pipeline), folder=str(checkpoints), resumes=True
    )


@pytest.fixture(scope="module")
def one(pipeline, checkpoints):
    torch.set_num_threads(1)
    yield programs.everything(Ranks(), str(pipeline), str(checkpoints), resumes=False)
    ranks.leave()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_gradients_of_two_ranks_equal_those_of_one_in_three_steps(one, two, kind):
    for found in two:
        for step in range(3):
            assert tiny.per_tensor(found[kind]["gradients"][step], one[kind]["gradients"][step]) < 1e-5


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_parameters_of_two_ranks_equal_those_of_one_after_sgd(one, two, kind):
    for step in range(3):
        expected, found = one[kind]["parameters"][step], two[0][kind]["parameters"][step]
        assert max(float((found[n] - expected[n]).abs().max()) for n in expected) < 1e-6


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_metrics_and_norms_of_two_ranks_equal_those_of_one(one, two, kind):
    for step in range(3):
        assert two[0][kind]["norms"][step] == pytest.approx(one[kind]["norms"][step], rel=1e-5, abs=1e-7)
        assert two[0][kind]["metrics"][step] == pytest.approx(one[kind]["metrics"][step], rel=1e-5, abs=1e-7)
        assert two[0][kind]["metrics"][step] == two[1][kind]["metrics"][step]


def test_two_ranks_that_compute_in_bf16_replay_a_bf16_rollout_and_agree_on_the_gradient(one, two):
    for found in (one["bf16"], two[0]["bf16"], two[1]["bf16"]):
        assert found["deviations"][0] <= 2e-3  # other batch sizes round otherwise
    difference = tiny.relative(two[0]["bf16"]["gradients"][0], one["bf16"]["gradients"][0])
    assert difference < 3e-2


def test_a_guided_step_with_a_divergence_term_has_one_gradient_on_any_number_of_ranks(one, two):
    assert two[0]["guided"]["metrics"][0]["actor/kl_loss"] > 0
    for found in two:
        assert tiny.per_tensor(found["guided"]["gradients"][0], one["guided"]["gradients"][0]) < 1e-5
        assert found["guided"]["metrics"][0] == pytest.approx(one["guided"]["metrics"][0], rel=1e-5, abs=1e-7)


def test_a_rank_without_rows_takes_part_and_changes_nothing(one, two):
    gradient, pairs, metrics = two[1]["empty rank"]
    expected, expected_pairs, expected_metrics = one["empty rank"]
    assert tiny.per_tensor(gradient, expected) < 1e-5
    assert pairs == expected_pairs and metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)


def test_infinity_on_one_rank_skips_the_step_on_all(one, two):
    for skipped, count, unchanged in (one["skip"], two[0]["skip"], two[1]["skip"]):
        assert skipped and count == 1 and unchanged


def test_adapters_of_two_ranks_score_like_those_of_one(one, two):
    for name, expected in one["adapters"]["scores"].items():
        found = torch.cat([rank["adapters"]["scores"][name] for rank in two])
        assert torch.allclose(found, expected, atol=1e-5)


def test_sharded_adapters_are_copied_and_averaged_by_name(one, two):
    for found in (one["adapters"], two[0]["adapters"]):
        for name, policy in found["policy"].items():
            assert torch.equal(found["copied"][name], policy)
        lora_b = [n for n in found["policy"] if "lora_B" in n]
        for name in lora_b:  # `old` starts with lora_B = 0
            assert torch.allclose(found["averaged"][name], 0.75 * found["policy"][name])
        assert found["trainable"] and all(".default." in name for name in found["trainable"])


@pytest.mark.parametrize("kind,rank", [("lora", 4), ("full", 0)])
def test_one_rank_goes_on_from_a_checkpoint_of_two(one, two, pipeline, checkpoints, kind, rank):
    extra, found = programs.resume(Ranks(), str(pipeline), str(checkpoints / f"{kind}-2"), rank)
    _same_step(found, two[0]["checkpoint"][kind])
    assert extra == {"version": 1}


@pytest.mark.parametrize("kind,rank", [("lora", 4), ("full", 0)])
def test_one_rank_goes_on_from_its_own_checkpoint_bit_by_bit(one, pipeline, checkpoints, kind, rank):
    _, found = programs.resume(Ranks(), str(pipeline), str(checkpoints / f"{kind}-1"), rank)
    for part in ("parameters", "ema"):
        for name, tensor in one["checkpoint"][kind][part].items():
            assert torch.equal(found[part][name], tensor)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_two_ranks_go_on_from_a_checkpoint_of_one(one, two, kind):
    _same_step(two[0]["resumed"][kind], one["checkpoint"][kind])


def test_a_state_of_two_ranks_is_the_same_bit_by_bit_on_one_and_then_on_two(two, pipeline, checkpoints):
    alone = programs.carry(Ranks(), str(pipeline), str(checkpoints), str(checkpoints / "carried"))
    places = {"source": str(checkpoints / "carried"), "target": str(checkpoints / "back")}
    for found in run_ranks("carry", 2, checkpoints / "carry", pipeline=str(pipeline), **places):
        for kind, tensors in alone.items():
            assert found[kind].keys() == tensors.keys()
            assert all(torch.equal(found[kind][name], tensor) for name, tensor in tensors.items())


def _same_step(found, expected):
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)
    for part in ("parameters", "ema"):
        for name, tensor in expected[part].items():
            # Adam divides by the gradient's own size: rounding of one near 0 moves a parameter by a share of lr
            assert (found[part][name] - tensor).abs().max() < 1e-4
