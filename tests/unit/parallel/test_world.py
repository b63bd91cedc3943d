"""The exchanges between ranks: real gloo ranks against sums made by hand, and one process that does nothing."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
from tests.ranks import RankFailure, in_ranks
from torch import nn

from traceforge.errors import ConfigError, RankError
from traceforge.parallel.devices import is_rank
from traceforge.parallel.meeting import choose_backend, meet
from traceforge.parallel.world import Device, World

ALONE = {}


def all_well(results):
    for result in results:
        assert not isinstance(result, RankFailure), result.trace
    return results


def parameters_of(rank: int) -> list[nn.Parameter]:
    """Return four parameters: with a gradient everywhere, on rank 1 only, nowhere, and in bfloat16."""
    first, second, third = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(5))
    half = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    first.grad = torch.arange(3.0) + 10 * rank
    if rank == 1:
        second.grad = torch.full((2, 2), 7.0)
    half.grad = torch.full((4,), 0.25 * (rank + 1), dtype=torch.bfloat16)
    return [first, second, third, half]


def everything(world, bucket_bytes):
    from traceforge.parallel import collectives

    parameters = parameters_of(world.rank)
    if bucket_bytes:
        collectives.sum_gradients(parameters, world._group, world._wire, bucket_bytes=bucket_bytes)
    else:
        world.sum_gradients(parameters)
    gradients = [None if each.grad is None else each.grad.float().tolist() for each in parameters]
    weights = [torch.full((3,), float(world.rank)), torch.full((2,), 5 + world.rank, dtype=torch.int64)]
    world.broadcast(weights)
    scores = world.gather_scores(torch.tensor([1.0, 2.0], requires_grad=True) * (world.rank + 1))
    return {
        "place": (world.rank, world.size, world.data_rank, world.branch_rank, world.backend),
        "gradients": gradients,
        "weights": [each.tolist() for each in weights],
        "scores": scores.tolist(),
        "scores_have_gradient": scores.requires_grad,
        "numbers": world.sum_numbers([world.rank + 1, 0.1]),
        "folder": world.share("folder", lambda: f"made by rank {world.rank}"),
    }


def test_four_ranks_in_a_grid_of_two_by_two_exchange_what_they_should():
    results = all_well(in_ranks(4, everything, 0, branch_parallel=True))
    assert [each["place"] for each in results] == [
        (0, 4, 0, 0, "gloo"), (1, 4, 0, 1, "gloo"), (2, 4, 1, 0, "gloo"), (3, 4, 1, 1, "gloo"),
    ]  # fmt: skip
    for each in results:
        assert each["gradients"] == [[60.0, 64.0, 68.0], [[7.0, 7.0], [7.0, 7.0]], None, [2.5] * 4]
        assert each["weights"] == [[0.0, 0.0, 0.0], [5, 5]]
        assert each["numbers"] == pytest.approx([10.0, 0.4], abs=1e-15)
        assert each["folder"] == "made by rank 0"
        assert not each["scores_have_gradient"]
    # Scores cross only within a branch group: ranks 0 and 1, ranks 2 and 3.
    assert [each["scores"] for each in results] == [[[1.0, 2.0], [2.0, 4.0]]] * 2 + [[[3.0, 6.0], [4.0, 8.0]]] * 2


def test_small_buckets_change_nothing():
    results = all_well(in_ranks(2, everything, 8))
    for each in results:
        assert each["gradients"] == [[10.0, 12.0, 14.0], [[7.0, 7.0], [7.0, 7.0]], None, [0.75] * 4]


def test_one_process_passes_through_the_same_calls_and_nothing_happens():
    world = meet(ALONE)
    assert type(world) is World
    world.start()
    parameters = parameters_of(1)
    world.sum_gradients(parameters)
    assert parameters[0].grad.tolist() == [10.0, 11.0, 12.0]
    assert parameters[2].grad is None
    world.broadcast(parameters)
    world.agree(parameters)
    world.barrier()
    assert world.gather_scores(torch.ones(2)).tolist() == [[1.0, 1.0]]
    assert world.sum_numbers([1, 2.5]) == [1.0, 2.5]
    assert world.share("folder", lambda: "here") == "here"
    with world.first_goes_first("data"):
        pass
    world.close()
    assert (world.rank, world.size, world.is_first) == (0, 1, True)


def one_bit_off(world, culprit):
    weights = [nn.Parameter(torch.arange(1000.0)), nn.Parameter(torch.ones(7, dtype=torch.bfloat16))]
    world.agree(weights)
    if world.rank == culprit:
        with torch.no_grad():
            weights[0][500] = torch.nextafter(weights[0][500], torch.tensor(1e9))
    world.agree(weights)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_whose_weights_differ_in_one_bit_is_named_on_every_rank(culprit):
    results = in_ranks(3, one_bit_off, culprit)
    for each in results:
        assert each.error_type == "DisagreementError"
        assert f"of rank {culprit} differ" in each.message


def sum_or_skip(world):
    if world.rank == 0:
        world.sum_gradients(parameters_of(0))
    else:
        time.sleep(2)  # alive, and elsewhere


def sum_or_go_on(world):
    if world.rank == 0:
        world.sum_gradients(parameters_of(0))
    world.sum_numbers([1.0])
    world.agree([torch.ones(3)])


def test_a_rank_that_leaves_an_exchange_out_and_sleeps_ends_the_others_in_the_time_limit():
    first, _ = in_ranks(2, sum_or_skip, exchange_timeout_s=1.0, limit_s=20)
    assert first.error_type == "RankLostError"
    assert "rank 0 lost the others during the sum of the gradients" in first.message
    assert "within 1 s" in first.message


def gather_or_skip(world):
    if world.rank == 0:
        world.gather_scores(torch.ones(2))
    else:
        time.sleep(2)


def test_the_time_limit_holds_between_branches_too():
    first, _ = in_ranks(2, gather_or_skip, branch_parallel=True, exchange_timeout_s=1.0, limit_s=20)
    assert "rank 0 lost the others during the scores" in first.message


def test_a_rank_that_leaves_an_exchange_out_and_goes_on_is_named_on_every_rank():
    for each in in_ranks(2, sum_or_go_on):
        assert each.error_type == "RankError"
        assert "rank 0 at the sum of the gradients (1), rank 1 at the sums of numbers (1)" in each.message


def test_a_dead_rank_is_noticed_at_once_whatever_the_time_limit():
    result, other = in_ranks(2, die_or_wait, exchange_timeout_s=600)
    assert result.error_type == "RankLostError"
    assert other.message == "the process ended without a word"


def die_or_wait(world):
    if world.rank == 1:
        os._exit(9)
    world.barrier()


def raise_if_not_first(world):
    order = []
    with world.first_goes_first("data"):
        order.append(time.monotonic())
        time.sleep(0.3)
    return order[0]


def test_rank_0_goes_first_and_the_others_find_its_work_done():
    first, second = all_well(in_ranks(2, raise_if_not_first))
    assert second - first >= 0.3


def test_an_odd_number_of_ranks_cannot_be_split_into_branches():
    environment = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match="3 cannot be split") as found:
        meet(environment, branch_parallel=True)
    assert "--ranks 2" in found.value.hint
    with pytest.raises(ConfigError, match="branch_parallel"):
        meet(ALONE, branch_parallel=True)


def test_a_meeting_point_that_nobody_opens_is_a_named_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(RankError, match=f"rank 1 cannot reach the meeting point 127.0.0.1:{port}"):
        meet(environment, meeting_timeout_s=1)


def test_a_port_in_use_is_a_named_error():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(RankError, match=f"rank 0 cannot open the meeting point 127.0.0.1:{port}") as found:
            meet(environment, meeting_timeout_s=1)
    assert "free one" in found.value.hint


def test_a_name_that_does_not_resolve_is_a_named_error():
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}
    with pytest.raises(RankError, match=r"cannot reach the meeting point no-such-host\.invalid:29500"):
        meet(environment, meeting_timeout_s=1)


def test_only_a_whole_description_makes_a_process_a_rank():
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert is_rank(whole)
    assert not is_rank({**whole, "WORLD_SIZE": "1"})
    for name in whole:
        assert not is_rank({key: value for key, value in whole.items() if key != name})


CARD_A, CARD_B, CPU = Device("cuda", "GPU-a"), Device("cuda", "GPU-b"), Device("cpu")


def test_the_backend_follows_the_devices(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert choose_backend("auto", [CARD_A, CARD_B], shared_device=False) == "nccl"
    assert choose_backend("gloo", [CARD_A, CARD_B], shared_device=False) == "gloo"
    assert choose_backend("auto", [CPU, CPU], shared_device=False) == "gloo"
    assert choose_backend("auto", [CARD_A, CARD_A], shared_device=True) == "gloo"


@pytest.mark.parametrize(
    ("asked", "devices", "shared", "message"),
    [
        ("auto", [CARD_A, CARD_B, CARD_A], False, r"ranks 0, 2 are on one card \(GPU-a\)"),
        ("nccl", [CARD_A, CARD_A], True, "'nccl' cannot be honoured: ranks share a card"),
        ("nccl", [CPU, CPU], False, "'nccl' cannot be honoured: the ranks run on the CPU"),
        ("auto", [CARD_A, CPU], False, "no GPU can be seen by rank 1, the others"),
    ],
)
def test_devices_that_cannot_work_together_are_refused_by_name(asked, devices, shared, message):
    with pytest.raises(ConfigError, match=message):
        choose_backend(asked, devices, shared_device=shared)
