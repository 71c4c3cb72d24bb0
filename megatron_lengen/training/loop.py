"""The training loop: build, resume, step, validate, save, leave."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import nn
from torch.utils.data import Dataset

from megatron_lengen.config import LengenConfig
from megatron_lengen.data.copy_task import TRAINING, VALIDATION, CopyRows
from megatron_lengen.data.datasets import build_datasets, micro_batches
from megatron_lengen.errors import BadInput, is_first_rank
from megatron_lengen.runtime import distributed, host
from megatron_lengen.runtime.watch import Watch
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.compilation import compile_layers
from megatron_lengen.training.engine import Engine, MegatronEngine
from megatron_lengen.training.generation import GenerationEvaluation
from megatron_lengen.training.guards import SkipGuard, Stop, replayable
from megatron_lengen.training.metrics import Reporter
from megatron_lengen.training.saver import Saver
from megatron_lengen.training.step import Data

ModelProvider = Callable[[LengenConfig], list[nn.Module]]


def train(settings: Settings, model_provider: ModelProvider) -> None:
    """Run training from settings to the last checkpoint.

    Args:
        settings: what `arguments.parse_settings` resolved.
        model_provider: builds this rank's model chunks with their initial weights.
    """
    distributed.start(settings.model, settings.training.distributed_timeout_minutes)
    try:
        with Watch(settings.training.distributed_timeout_minutes) as watch:
            Trainer(settings, model_provider, watch).run()
    finally:
        distributed.stop()


class Trainer:
    """One run on this rank."""

    def __init__(
        self, settings: Settings, model_provider: ModelProvider, watch: Watch | None = None
    ) -> None:
        self.settings, self.watch = settings, watch
        with _fits_into_memory(settings):
            self.engine = _engine(settings, model_provider(settings.model))
        self.progress = self.engine.load()
        self.train_set, self.valid_set = self._datasets()
        self.generation = GenerationEvaluation.of(settings, self.engine.chunks)
        self.saver = Saver(settings, self.engine, self.progress)

    def run(self) -> None:
        """Train until --train-iters, a signal, or another reason to leave.

        Raises:
            Stop: where steps fail in a row, or what a rerun shows ends the run.
        """
        training = self.settings.training
        # Before the first line: who reads it may send a signal.
        leaving = _Leaving(training.exit_interval, training.exit_duration_in_mins)
        self._announce()
        reporter = Reporter(self.settings, dist.get_world_size(), self.progress)
        stopped: Stop | None = None
        try:
            self._iterate(reporter, leaving)
        except Stop as stop:
            stopped = stop
        if stopped is None or stopped.save:
            self.saver.save(self.progress, again=stopped is not None and stopped.save_again)
        self.saver.finish()
        reporter.close()
        if stopped is not None:
            raise stopped

    def _iterate(self, reporter: Reporter, leaving: _Leaving) -> None:
        training, progress = self.settings.training, self.progress
        batch = training.global_batch_size
        assert batch is not None
        skips, save_due = SkipGuard(self.settings), False
        data = replayable(self._train_data(), training.rerun_mode)
        while progress.iteration < training.train_iters:
            if self.watch is not None:
                self.watch.iteration = progress.iteration + 1
            result = self.engine.train(data, progress.consumed_samples)
            progress.iteration += 1
            progress.consumed_samples += batch
            progress.skipped += result.skipped
            reporter.step(progress, result)
            skips.note(progress.iteration, progress.consumed_samples - 1, result)
            if self._time_to_validate():
                self._validate(reporter)
            stop = leaving.now(progress.iteration)
            self.saver.poll()
            if training.save_interval and progress.iteration % training.save_interval == 0:
                save_due = True
            # Weights may be why steps fail: the newest checkpoint is one that a good step made.
            if save_due and not result.skipped:
                self.saver.save(progress)
                save_due = False
                reporter.restart_clock()
            if stop:
                return

    def _validate(self, reporter: Reporter) -> None:
        loss = scores = None
        if self.valid_set is not None:
            steps = self.settings.training.eval_iters
            loss = self.engine.evaluate(self._valid_data(), steps)
        if self.generation is not None:
            scores = self.generation.scores()
        if loss is not None or scores is not None:
            reporter.validation(self.progress, loss, scores)
            reporter.restart_clock()

    def _time_to_validate(self) -> bool:
        iteration, interval = self.progress.iteration, self.settings.training.eval_interval
        last = iteration == self.settings.training.train_iters
        return last or bool(interval and iteration % interval == 0)

    # ---- data --------------------------------------------------------------------------------

    def _datasets(self) -> tuple[Dataset, Dataset | None]:
        training, model = self.settings.training, self.settings.model
        batch, lengths = training.global_batch_size or 0, training.copy_lengths
        if lengths is not None:
            train, valid = (
                CopyRows(model.seed, stream, lengths, model.seq_length)
                for stream in (TRAINING, VALIDATION)
            )
            return train, valid if training.eval_iters else None
        train_set, valid_set = build_datasets(
            tokenizer=self.settings.tokenizer,
            seq_length=model.seq_length,
            seed=model.seed,
            samples=(self._last_sample(), training.eval_iters * batch),
            data_path=training.data_path,
            train_data_path=training.train_data_path,
            valid_data_path=training.valid_data_path,
            split=training.split,
            cache_path=training.data_cache_path,
            eod_mask_loss=training.eod_mask_loss,
        )
        return train_set, valid_set if training.eval_iters else None

    def _train_data(self) -> Data:
        return self._per_chunk(self.train_set, self.progress.consumed_samples, self._last_sample())

    def _last_sample(self) -> int:
        """Samples of the whole run; batches before a resume may have had another size."""
        left = max(0, self.settings.training.train_iters - self.progress.iteration)
        return self.progress.consumed_samples + left * (
            self.settings.training.global_batch_size or 0
        )

    def _valid_data(self) -> Data:
        training = self.settings.training
        assert self.valid_set is not None
        end = training.eval_iters * (training.global_batch_size or 0)
        return self._per_chunk(self.valid_set, 0, end)

    def _per_chunk(self, dataset: Dataset, start: int, end: int) -> Data:
        """One iterator for each chunk that embeds tokens, computes the loss or masks documents."""
        masked = self.settings.model.document_boundaries == "mask"
        iterators = [
            micro_batches(
                dataset,
                start,
                end,
                self.settings.training.micro_batch_size,
                parallel_state.get_data_parallel_rank(),
                parallel_state.get_data_parallel_world_size(),
                self.settings.training.num_workers,
                self.settings.tokenizer.eod if masked else None,
            )
            if masked or inner.pre_process or inner.post_process
            else None
            for inner in unwrap_model(self.engine.chunks)
        ]
        return iterators if len(iterators) > 1 else iterators[0]

    def _announce(self) -> None:
        if not is_first_rank():
            return
        config, training = self.settings.model, self.settings.training
        found = self.settings.load_from
        origin = f"loaded {found.folder}" if found else "initial weights"
        ranks = config.context_parallel_size
        context = f"CP {ranks}, " if ranks > 1 else ""
        dropout = "no dropout"
        if config.dropout_on:
            dropout = f"{config.dropout_variant} dropout p = {config.exact_dropout_rate:.4g}"
        print(
            f"{dist.get_world_size()} processes (TP {config.tensor_model_parallel_size}, PP "
            f"{config.pipeline_model_parallel_size}, {context}DP "
            f"{self.settings.data_parallel_size}) on {host.device().type}, "
            f"{config.transformer_impl} layers, "
            f"{'bf16' if config.bf16 else 'fp32'}, {dropout}; {origin}; iteration "
            f"{self.progress.iteration} of {training.train_iters}, batches of "
            f"{training.global_batch_size} x {config.seq_length} tokens",
            flush=True,
        )


@contextlib.contextmanager
def _fits_into_memory(settings: Settings) -> Iterator[None]:
    """Say in one line that weights, gradients and optimizer need more memory than there is."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        signs = ("allocate memory", "Storage size calculation overflowed")
        if not isinstance(error, torch.OutOfMemoryError) and not any(s in text for s in signs):
            raise
        found = re.search(r"allocate ([\d.]+ ?\w+)", text)
        raise BadInput(
            f"--num-layers {settings.model.num_layers} --hidden-size {settings.model.hidden_size}: "
            f"the model does not fit into memory (asked for {found[1] if found else 'more'} at "
            "once); allowed: a smaller one, or more processes in --tensor-model-parallel-size or "
            "--pipeline-model-parallel-size"
        ) from error


def _engine(settings: Settings, chunks: list[nn.Module]) -> Engine:
    compile_layers(settings, chunks)
    if settings.training.engine == "deepspeed":
        from megatron_lengen.training.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(settings, chunks)
    return MegatronEngine(settings, chunks)


class _Leaving:
    """Reasons to save and leave early; every rank decides the same."""

    def __init__(self, interval: int | None, minutes: float | None) -> None:
        self._interval, self._minutes = interval, minutes
        self._start = time.monotonic()
        self._signal = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def now(self, iteration: int) -> bool:
        """Whether to leave after this iteration."""
        overtime = self._minutes is not None and time.monotonic() - self._start > 60 * self._minutes
        flag = torch.tensor(float(overtime or self._signal != 0), device=host.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag) or bool(self._interval and iteration % self._interval == 0)
