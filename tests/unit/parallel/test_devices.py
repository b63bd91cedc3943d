"""Which card each rank gets, on environment variables written by hand."""

from __future__ import annotations

import pytest

from traceforge.errors import ConfigError
from traceforge.parallel.devices import check_rank_environment, choose_devices, claim_device, visible_devices

A, B = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", ()),
        ("0", ("0",)),
        ("5,7", ("5", "7")),
        (" 1 , 0 ", ("1", "0")),
        (f"{B},{A}", (B, A)),
        ("MIG-1234,3", ("MIG-1234", "3")),
        ("0,-1,1", ("0",)),  # CUDA reads up to the first entry that is no device
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(value, expected):
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_devices(environment) == expected


def chosen(*, ranks=None, gpus=None, visible=None, num_gpus=0, shared=False):
    return choose_devices(num_ranks=ranks, gpus=gpus, visible=visible, num_gpus=num_gpus, shared=shared)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"ranks": 2}, ("", "")),  # no card anywhere: the CPU
        ({"ranks": 2, "visible": (), "num_gpus": 0}, ("", "")),  # all cards hidden: the CPU
        ({"ranks": 2, "num_gpus": 4}, ("0", "1")),
        ({"ranks": 2, "visible": ("5", "7"), "num_gpus": 2}, ("5", "7")),
        ({"gpus": "1,0", "num_gpus": 2}, ("1", "0")),
        ({"gpus": "1,0", "visible": ("5", "7"), "num_gpus": 2}, ("7", "5")),
        ({"gpus": "0", "visible": ("1", "0"), "num_gpus": 2}, ("1",)),
        ({"gpus": "1", "visible": (B, A), "num_gpus": 2}, (A,)),
        ({"gpus": "GPU-aaaa,GPU-bbbb", "visible": (B, A), "num_gpus": 2}, (A, B)),
        ({"gpus": f"{A},{B}", "num_gpus": 2}, (A, B)),
        ({"ranks": 2, "gpus": "0,1", "num_gpus": 2}, ("0", "1")),
        ({"ranks": 3, "num_gpus": 2, "shared": True}, ("0", "1", "0")),
        ({"ranks": 2, "gpus": "1", "num_gpus": 2, "shared": True}, ("1", "1")),
        ({"gpus": "0,0", "num_gpus": 2, "shared": True}, ("0", "0")),
    ],
)
def test_each_rank_gets_the_card_it_was_promised(asked, expected):
    assert chosen(**asked) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ranks": 3, "num_gpus": 2}, "--ranks 3: 3 ranks need 3 GPUs, 2 can be seen"),
        ({"ranks": 2, "visible": ("5",), "num_gpus": 1}, r"1 can be seen \(CUDA_VISIBLE_DEVICES=5\)"),
        ({"gpus": "0,2", "num_gpus": 2}, "there is no GPU 2, 2 can be seen"),
        ({"gpus": "0", "num_gpus": 0}, "--gpus 0: no GPU can be seen"),
        ({"gpus": "5", "visible": ("5", "7"), "num_gpus": 2}, "there is no GPU 5"),
        ({"gpus": "0,0", "num_gpus": 2}, r"two ranks on one card \(0\)"),
        ({"gpus": "0,1", "ranks": 3, "num_gpus": 4}, "--gpus 0,1 and --ranks 3 contradict each other"),
        ({"gpus": "GPU-cccc", "visible": (A, B), "num_gpus": 2}, "there is no such GPU"),
        ({"gpus": "GPU-", "visible": (A, B), "num_gpus": 2}, "neither a number nor a UUID"),
        ({"gpus": "GPU-aaaa", "visible": ("0", "1"), "num_gpus": 2}, "by UUID, CUDA_VISIBLE_DEVICES=0,1 by number"),
        ({"gpus": "first", "num_gpus": 2}, "'first' is neither a number nor a UUID"),
        ({"gpus": "0,", "num_gpus": 2}, "'' is neither"),
        ({"gpus": "GPU-aaaa", "num_gpus": 0}, "--gpus GPU-aaaa: no GPU can be seen"),
    ],
)
def test_a_card_that_cannot_be_had_is_refused_by_name_with_the_way_out(asked, message):
    with pytest.raises(ConfigError, match=message) as found:
        chosen(**asked)
    assert found.value.hint


def claimed(value, *, rank, size=2, shared=False, num_gpus=2):
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    claim_device(environment, local_rank=rank, local_size=size, shared=shared, count_gpus=lambda: num_gpus)
    return environment.get("CUDA_VISIBLE_DEVICES")


def test_a_rank_of_torchrun_hides_all_cards_but_its_own():
    assert [claimed("5,7", rank=rank) for rank in (0, 1)] == ["5", "7"]
    assert [claimed(f"{B},{A}", rank=rank) for rank in (0, 1)] == [B, A]
    assert [claimed(None, rank=rank) for rank in (0, 1)] == ["0", "1"]
    assert claimed("3", rank=1) == "3"  # --virtual-local-rank has done it; two on one card are found when ranks meet
    assert claimed("", rank=1) == ""
    assert claimed("0,1", rank=0, size=1) == "0,1"


def test_ranks_of_torchrun_may_share_cards_only_by_name():
    with pytest.raises(ConfigError, match="rank 2 of this host has no card of its own: 2 can be seen"):
        claimed("0,1", rank=2, size=3)
    assert claimed("0,1", rank=2, size=3, shared=True) == "0"
    assert claimed(None, rank=3, size=4, shared=True, num_gpus=2) == "1"


WHOLE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "0"}, WHOLE])
def test_an_environment_of_one_process_or_of_a_whole_rank_is_taken(environment):
    check_rank_environment(environment)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x', not a number"),
        ({"RANK": "zero"}, "RANK is 'zero', not a number"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', not a number"),
        ({"RANK": "5"}, "RANK is 5, WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
    ],
)
def test_half_of_a_rank_is_refused_by_the_variable_s_name(changes, message):
    with pytest.raises(ConfigError, match=message) as refused:
        check_rank_environment(WHOLE | changes)
    assert "--ranks" in str(refused.value)
