"""Several processes as one: rows dealt out and put together again. The other ranks are played by hand."""

import pytest
import torch
import torch.distributed as dist
from torch import tensor

from ppo_lab.llm.ranks import Ranks, read_ranks
from ppo_lab.stability import whiten

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.fixture
def launcher(monkeypatch):
    """A function that sets what a launcher sets, and nothing else of it."""

    def launched(**values):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return launched


@pytest.fixture
def parts_of_all(monkeypatch):
    """A function (what each rank sends): whoever gathers gets that. Returns the list of what was really sent."""

    def play(*parts):
        sent = []

        def all_gather(received, own):
            sent.append(own)
            for place, part in zip(received, parts, strict=True):
                assert part.shape == own.shape and part.dtype == own.dtype
                place.copy_(part)

        monkeypatch.setattr(dist, "all_gather", all_gather)
        return sent

    return play


# --- who this process is


def test_without_a_launcher_there_is_one_rank(launcher):
    launcher()
    assert read_ranks() == Ranks() == Ranks(rank=0, world_size=1, local_rank=0)


def test_a_launcher_says_who_is_who(launcher):
    launcher(RANK="9", LOCAL_RANK="1", WORLD_SIZE="16")
    assert read_ranks() == Ranks(rank=9, world_size=16, local_rank=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE, got 2 and 2"),
        ({"RANK": "1"}, "RANK must be below WORLD_SIZE, got 1 and 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK must be below WORLD_SIZE, got 0 and 0"),
        ({"RANK": "first"}, "RANK must be a number, got 'first'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be a number, got '-1'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE must be a number, got ''"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK must be a number, got '1.0'"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(launcher, values, message):
    launcher(**values)
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_ranks()


# --- rows dealt out and put together


def test_B37_ten_rows_on_four_ranks_are_three_each_with_two_that_count_for_nothing():
    shares = [Ranks(rank, 4).share(torch.arange(10)).tolist() for rank in range(4)]
    assert shares == [[0, 4, 8], [1, 5, 9], [2, 6, -1], [3, 7, -1]]


@pytest.mark.parametrize(
    ("rows", "shares"), [([7, 3], [[7], [3]]), ([5], [[5], [-1]]), ([4, 2, 9], [[4, 9], [2, -1]]), ([], [[], []])]
)
def test_any_rows_are_dealt_out_in_their_order(rows, shares):
    rows = tensor(rows, dtype=torch.int64)
    assert [Ranks(rank, 2).share(rows).tolist() for rank in range(2)] == shares


def test_one_rank_has_all_rows():
    assert Ranks().share(tensor([3, 1, 2])).tolist() == [3, 1, 2]
    assert Ranks().gather_rows(tensor([3, 1, 2]), 3).tolist() == [3, 1, 2]


def test_B37_the_mean_of_ten_scores_on_four_ranks_is_5_5_of_10(parts_of_all):
    # What ranks 2 and 3 make of the row that is none is whatever it is.
    parts = [tensor([1.0, 5, 9]), tensor([2.0, 6, 10]), tensor([3.0, 7, 99]), tensor([4.0, 8, -99])]
    sent = parts_of_all(*parts)
    for rank in range(4):
        scores = Ranks(rank, 4).gather_rows(parts[rank], 10)
        assert scores.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        assert float(scores.mean()) == 5.5
        assert torch.equal(sent[-1], parts[rank])


def test_rows_of_truth_values_and_of_several_numbers_keep_their_type_and_their_shape(parts_of_all):
    own, other = tensor([[True, False], [True, True]]), tensor([[False, False], [False, True]])
    parts_of_all(own.to(torch.uint8), other.to(torch.uint8))
    rows = Ranks(0, 2).gather_rows(own, 3)
    assert rows.dtype == torch.bool
    assert rows.tolist() == [[True, False], [False, False], [True, True]]
    parts_of_all(tensor([[1, 2]]), tensor([[3, 4]]))
    assert Ranks(1, 2).gather_rows(tensor([[3, 4]]), 2).tolist() == [[1, 2], [3, 4]]


def test_rows_that_do_not_lie_side_by_side_in_memory_are_sent_all_the_same(parts_of_all):
    own = tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[:, ::2]
    sent = parts_of_all(own.contiguous(), own.contiguous())
    Ranks(0, 2).gather_rows(own, 4)
    assert sent[0].is_contiguous()


def test_sums_and_the_largest_of_one_rank_are_its_own():
    assert Ranks().reduce(tensor([1.0, 2.0])).tolist() == [1, 2]
    assert Ranks().largest(3, torch.device("cpu")) == 3
    Ranks().wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_sums_and_the_largest_are_over_all_ranks(monkeypatch, rank):
    numbers = [tensor([5, 1]), tensor([3, 7])]

    def all_reduce(own, operation):
        both = torch.stack([number[: len(own)] for number in numbers])
        own.copy_(both.sum(0) if operation == dist.ReduceOp.SUM else both.amax(0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert Ranks(rank, 2).reduce(numbers[rank].clone()).tolist() == [8, 8]
    assert Ranks(rank, 2).reduce(numbers[rank].clone(), dist.ReduceOp.MAX).tolist() == [5, 7]
    assert Ranks(rank, 2).largest(int(numbers[rank][0]), torch.device("cpu")) == 5


def test_B12_whitening_gathered_rows_uses_the_moments_of_all(parts_of_all):
    # Ranks 0 and 1 hold [1, 2] and [3, 10]: mean 4, variance 50/3. Alone each would get ∓0.7071.
    parts = [tensor([[1.0, 2.0]]), tensor([[3.0, 10.0]])]
    parts_of_all(*parts)
    expected = tensor([[-0.734847, -0.489898], [-0.244949, 1.469694]])
    for rank in range(2):
        rows = Ranks(rank, 2).gather_rows(parts[rank], 2)
        torch.testing.assert_close(whiten(rows), expected, atol=1e-6, rtol=0)
        # Nothing of rank 1 counts: it joins all the same and gets zeros.
        mask = tensor([[True, True], [False, False]])
        torch.testing.assert_close(whiten(rows, mask), tensor([[-0.707107, 0.707107], [0, 0]]), atol=1e-5, rtol=0)
