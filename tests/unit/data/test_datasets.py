"""Which row comes when: independent of ranks, micro-batches and interruptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_lengen.data.datasets import (
    blend_of,
    build_datasets,
    check_split,
    micro_batches,
)
from megatron_lengen.data.indexed import DatasetWriter
from megatron_lengen.data.tokenizer import build_tokenizer
from megatron_lengen.errors import BadInput
from megatron_lengen.runtime import distributed

LENGTH, SAMPLES = 8, 48
EOD = 5000


@pytest.fixture(scope="module", autouse=True)
def groups(process_groups):
    """Megatron's builder asks which rank it is."""


def written(prefix, first: int, documents: int, length: int = 30):
    """Documents of consecutive numbers, each with an end: every row tells where it is from."""
    with DatasetWriter(prefix, np.int32) as writer:
        for index in range(documents):
            start = first + index * length
            tokens = np.append(np.arange(start, start + length - 1), EOD).astype(np.int32)
            writer.add_documents(tokens, np.array([length]))
    return str(prefix)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data") / "a", 0, 40)


def datasets(samples: tuple[int, int] = (SAMPLES, 8), seed: int = 1, **options):
    options.setdefault("split", "80,20,0")
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=EOD + 1)
    return build_datasets(tokenizer, LENGTH, seed, samples, **options)


def numbers(batches) -> list[int]:
    return [int(sample) for batch in batches for sample in batch["samples"]]


class Numbers(torch.utils.data.Dataset):
    """Row n holds n."""

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        row = torch.full((LENGTH,), n)
        return {"tokens": row, "labels": row + 1, "loss_mask": torch.ones(LENGTH)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_ranks_share_every_global_batch(ranks, micro_batch):
    """Report 31 of the field: a step's rows are the same set, whatever the layout."""
    batch, start, end = 16, 32, 96
    per_rank = [
        numbers(micro_batches(Numbers(), start, end, micro_batch, rank, ranks))
        for rank in range(ranks)
    ]
    share = batch // ranks
    for step in range((end - start) // batch):
        rows = [row[step * share : (step + 1) * share] for row in per_rank]
        first = start + step * batch
        assert sorted(number for row in rows for number in row) == list(range(first, first + batch))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_carry_their_numbers(workers):
    for batch in micro_batches(Numbers(), 4, 12, 2, 1, 2, workers):
        assert torch.equal(batch["tokens"][:, 0], batch["samples"])
        assert batch["tokens"].shape == batch["loss_mask"].shape == (2, LENGTH)


def test_resuming_continues_at_the_next_row():
    whole = numbers(micro_batches(Numbers(), 0, 64, 2, 0, 1))
    first = numbers(micro_batches(Numbers(), 0, 32, 4, 0, 1))
    rest = [numbers(micro_batches(Numbers(), 32, 64, 2, rank, 2)) for rank in (0, 1)]
    assert first + sorted(rest[0] + rest[1]) == whole == list(range(64))
    assert numbers(micro_batches(Numbers(), 64, 64, 2, 0, 1)) == []


def rows_of(dataset, count: int = SAMPLES) -> torch.Tensor:
    """[count, LENGTH + 1] tokens with the last label behind them."""
    rows = [dataset[i] for i in range(count)]
    assert all(torch.equal(row["tokens"][1:], row["labels"][:-1]) for row in rows)
    return torch.stack([torch.cat((row["tokens"], row["labels"][-1:])) for row in rows])


def test_rows_are_stretches_of_the_documents(prefix):
    """Inside a document labels are the next numbers; behind its end another begins."""
    rows = rows_of(datasets(data_path=[prefix])[0])
    inside = (rows[:, :-1] != EOD) & (rows[:, 1:] != EOD)
    assert torch.equal(rows[:, 1:][inside], rows[:, :-1][inside] + 1)
    assert len({tuple(row.tolist()) for row in rows}) == SAMPLES


def test_order_follows_the_seed_alone(prefix):
    one, same, other = (rows_of(datasets(seed=seed, data_path=[prefix])[0]) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_more_rows_than_the_data_has_go_through_it_again(prefix):
    train, _ = datasets(samples=(400, 0), data_path=[prefix], split="1")
    rows = rows_of(train, 400)
    tokens = rows[:, :-1].flatten()
    counts = torch.bincount(tokens[tokens != EOD], minlength=1)
    assert counts.max() == 3 and counts[counts > 0].min() >= 2  # 400 x 8 of 1200 tokens


def test_validation_shares_no_document_with_training(prefix):
    train, valid = datasets(data_path=[prefix], split="80,20,0")
    documents = [
        {int(token) // 30 for token in rows_of(part, n).flatten() if token != EOD}
        for part, n in ((train, SAMPLES), (valid, 8))
    ]
    assert documents[1] and not documents[0] & documents[1]
    assert datasets(data_path=[prefix], split="1")[1] is None


def test_blends_keep_their_weights(tmp_path, prefix):
    other = written(tmp_path / "b", 2000, 40)
    train, _ = datasets(samples=(100, 4), data_path=["3", prefix, "1", other])
    from_other = (rows_of(train, 100)[:, 0].clamp(max=EOD - 1) >= 2000).sum().item()
    assert 20 <= from_other <= 30
    train, valid = datasets(train_data_path=[prefix], valid_data_path=[other])
    assert all(t < 2000 or t == EOD for t in rows_of(train).flatten())
    assert all(t >= 2000 for t in rows_of(valid, 8).flatten())
    assert datasets(train_data_path=[prefix])[1] is None


@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_every_token_is_scored_but_those_behind_an_end_where_asked(prefix, eod_mask_loss):
    train, _ = datasets(data_path=[prefix], eod_mask_loss=eod_mask_loss)
    ends = 0
    for i in range(SAMPLES):
        row = train[i]
        at_end = row["tokens"] == EOD
        ends += int(at_end.sum())
        expected = ~at_end if eod_mask_loss else torch.ones(LENGTH, dtype=torch.bool)
        assert torch.equal(row["loss_mask"] > 0, expected)
    assert ends > 0


def test_mock_data_needs_no_files():
    one, other = datasets()[0], datasets()[0]
    assert torch.equal(rows_of(one), rows_of(other))


def test_a_read_only_folder_works_with_a_cache(tmp_path, prefix):
    """Report 30 of the field; the indices go where they are told."""
    datasets(data_path=[prefix], cache_path=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir())
    assert distributed.world_size() == 1


@pytest.mark.parametrize(
    "paths, expected",
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["0.3", "a", "0.7", "b"], (["a", "b"], [0.3, 0.7])),
        (["1", "2"], (["2"], [1.0])),
    ],
)
def test_blends(paths, expected):
    assert blend_of(paths) == expected


@pytest.mark.parametrize("paths", [["0.3", "a", "b"], ["0.3", "a", "b", "c"], ["0.3"]])
def test_mixtures_of_weights_and_prefixes_are_refused(paths):
    with pytest.raises(BadInput, match="data paths: found"):
        blend_of(paths)


@pytest.mark.parametrize("paths", [["-1", "a", "1", "b"], ["nan", "a"], ["0", "a", "0", "b"]])
def test_weights_that_cannot_be_shares_are_refused(paths):
    with pytest.raises(BadInput, match=r"data paths: .*weights"):
        blend_of(paths)


@pytest.mark.parametrize(
    "documents, split, validation, empty",
    [
        (40, "99,1,0", True, "validation"),
        (40, "99,1,0", False, None),
        (40, "1", True, None),
        (60, "99,1,0", True, None),
        (1, "0.4,0.6", True, "training"),
        (1, "1,1", False, "training"),
        (2, "1,1", True, None),
    ],
)
def test_an_empty_share_is_refused(documents, split, validation, empty):
    """Megatron-Core would count epochs of nothing for ever."""
    if empty is None:
        check_split("p", documents, split, validation)
    else:
        with pytest.raises(BadInput, match=f"--split: found {split}, .* {empty} share of p"):
            check_split("p", documents, split, validation)


def test_without_validation_its_share_is_not_built(prefix):
    train, valid = datasets(samples=(SAMPLES, 0), data_path=[prefix], split="99,1,0")
    assert valid is None and len(train) >= SAMPLES
