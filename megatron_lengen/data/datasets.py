"""Training and validation datasets, and the batches that a rank reads from them.

A row's number in its dataset is its sample number: the row's place in training order, counted over
the whole run. Which rank computes a row follows from its number alone, so data order does not
depend on the layout, and a resumed run continues at the next number.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_lengen.data.index_cache import build_on_every_machine
from megatron_lengen.data.tokenizer import Tokenizer
from megatron_lengen.errors import BadInput

Batch = dict[str, Tensor]


class _DatasetTokenizer:
    """What Megatron's datasets ask of a tokenizer."""

    pad = -1  # rows are always full; no real id may stand for padding

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size, self.eod = tokenizer.vocab_size, tokenizer.eod
        self.unique_identifiers = {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
        }


def blend_of(paths: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights from PREFIX... or WEIGHT PREFIX pairs.

    Raises:
        BadInput: for a mixture of both, or weights that are no shares.
    """

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    weights = [number(text) for text in paths[::2]]
    if weights[0] is None:
        return list(paths), None
    if len(paths) % 2 or None in weights:
        raise BadInput(
            f"data paths: found {' '.join(paths)}; allowed: prefixes, or WEIGHT PREFIX pairs"
        )
    shares = [weight for weight in weights if weight is not None]
    if not all(0 <= share < math.inf for share in shares) or not any(shares):
        raise BadInput(
            f"data paths: found the weights {' '.join(paths[::2])}; allowed: 0 or more, not all 0"
        )
    return list(paths[1::2]), shares


def check_split(prefix: str, documents: int, split: str, validation: bool) -> None:
    """Raise BadInput where a share that is needed holds no document.

    Megatron-Core would go through such a share over and over without end.

    Args:
        documents: how many the dataset has.
        split: shares as in 99,1,0.
        validation: whether the second share is needed.
    """
    shares = [float(share) for share in split.split(",")]
    total, first = sum(shares), 0
    for name, index in (("training", 0), ("validation", 1)):
        last = round(sum(shares[: index + 1]) / total * documents)
        needed = index == 0 or (validation and len(shares) > 1 and shares[1] > 0)
        if needed and last <= first:
            raise BadInput(
                f"--split: found {split}, which leaves the {name} share of {prefix} ({documents} "
                "documents) empty; allowed: a larger share, --eval-iters 0, or --train-data-path "
                "and --valid-data-path"
            )
        first = last


def build_datasets(
    tokenizer: Tokenizer,
    seq_length: int,
    seed: int,
    samples: tuple[int, int],
    data_path: list[str] | None = None,
    train_data_path: list[str] | None = None,
    valid_data_path: list[str] | None = None,
    split: str = "99,1,0",
    cache_path: str | None = None,
    eod_mask_loss: bool = False,
) -> tuple[Dataset, Dataset | None]:
    """Megatron's GPT datasets for training and validation; mock ones where no path is given.

    Called on all ranks (see index_cache).

    Args:
        samples: rows needed for training and for validation.

    Returns:
        Training and validation datasets; None where the data has no validation share.
    """
    validate = samples[1] > 0
    options: dict[str, Any] = {"split": split}
    if train_data_path:
        held_out = blend_of(valid_data_path) if valid_data_path and validate else None
        options = {"blend_per_split": [blend_of(train_data_path), held_out, None]}
    elif data_path:
        options["blend"] = blend_of(data_path)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        path_to_cache=cache_path,
        tokenizer=_DatasetTokenizer(tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=False,
        **options,
    )
    if config.split_matrix is not None:
        # Nothing reads the test share.
        config.split_matrix = [
            config.split_matrix[0],
            config.split_matrix[1] if validate else None,
            None,
        ]
    cls = MockGPTDataset if config.mock else GPTDataset
    if config.mock:
        # Its indices cannot be cached, which Megatron would say three times.
        logging.getLogger(GPTDataset.__module__).setLevel(logging.ERROR)
    builder = BlendedMegatronDatasetBuilder(cls, [*samples, 0], lambda: True, config)
    train, valid, _ = build_on_every_machine(builder)
    if train is None:
        raise BadInput("data: the training share is empty")
    return train, valid


def document_numbers(tokens: Tensor, eod: int) -> Tensor:
    """Which document of its row each token belongs to: [..., s] int64, from 0.

    An end-of-document token is the last of its document.
    """
    ends = (tokens == eod).long()
    return ends.cumsum(-1) - ends


class _NumberedRows(Dataset):
    """Rows that carry their sample numbers, and their documents where `eod` is given."""

    def __init__(self, dataset: Dataset, eod: int | None) -> None:
        self.dataset, self.eod = dataset, eod

    def __getitem__(self, sample: int) -> Batch:
        row = self.dataset[sample]
        numbered = {
            "tokens": row["tokens"],
            "labels": row["labels"],
            "loss_mask": row["loss_mask"],
            "samples": torch.tensor(sample, dtype=torch.int64),
        }
        if self.eod is not None:
            numbered["documents"] = document_numbers(row["tokens"], self.eod)
        return numbered


class _RankRows:
    """The sample numbers of each micro-batch of one data-parallel rank, in order."""

    def __init__(self, start: int, end: int, micro_batch: int, rank: int, ranks: int) -> None:
        self.start, self.end = start, end
        self.micro_batch, self.rank, self.ranks = micro_batch, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        step = self.micro_batch * self.ranks
        for first in range(self.start, self.end - step + 1, step):
            begin = first + self.rank * self.micro_batch
            yield list(range(begin, begin + self.micro_batch))


def _outlive_signals(worker: int) -> None:
    # A signal to the whole group is for the training process, which still needs its rows.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def micro_batches(
    dataset: Dataset,
    start: int,
    end: int,
    micro_batch: int,
    rank: int,
    ranks: int,
    workers: int = 0,
    eod: int | None = None,
) -> Iterator[Batch]:
    """A rank's micro-batches of samples start .. end - 1.

    Args:
        rank, ranks: data-parallel rank and size.
        workers: loading processes.
        eod: the end-of-document token, where batches shall carry their documents.

    Yields:
        tokens, labels [b, s] int64; loss_mask [b, s] fp32; samples [b] int64; with `eod` documents
        [b, s] int64 (see `document_numbers`).
    """
    rows = _RankRows(start, end, micro_batch, rank, ranks)
    loader = DataLoader(
        _NumberedRows(dataset, eod),
        batch_sampler=rows,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        worker_init_fn=_outlive_signals,
    )
    return iter(loader)
