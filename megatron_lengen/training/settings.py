"""What a run does, besides the model, the optimizer and data parallelism."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from megatron_lengen.errors import BadInput, require
from megatron_lengen.training.task_settings import TaskSettings

Style = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
DecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
EngineName = Literal["megatron", "deepspeed"]
RerunMode = Literal["disabled", "validate_results"]


@dataclass
class TrainingSettings(TaskSettings):
    """Batches, schedule, data, checkpoints and reports of a run."""

    train_iters: int = 0
    """Iterations to train."""

    micro_batch_size: int = 1
    """Rows that one process computes at a time."""

    global_batch_size: int | None = None
    """Rows of a step over the whole run (default: one micro-batch for each data-parallel rank)."""

    lr_decay_style: Style = "linear"
    """Shape of the learning rate after warm-up; WSD is warm-up, stable, decay."""

    lr_decay_iters: int | None = None
    """Iterations until the rate reaches --min-lr (default: --train-iters)."""

    lr_warmup_iters: int | None = None
    """Iterations of linear warm-up."""

    lr_warmup_fraction: float | None = None
    """Warm-up as a share of --lr-decay-iters instead."""

    lr_warmup_init: float = 0.0
    """Rate at the first step of warm-up."""

    lr_wsd_decay_style: DecayStyle = "exponential"
    """Shape of WSD's annealing."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of WSD's annealing, at the end of --lr-decay-iters."""

    override_opt_param_scheduler: bool = False
    """On resuming, take the schedule from the command line instead of the checkpoint."""

    use_checkpoint_opt_param_scheduler: bool = False
    """On resuming, take the schedule from the checkpoint even where flags differ."""

    decay_embeddings: bool = True
    """Apply weight decay to the embedding and the output layer."""

    decay_all: bool = False
    """Apply weight decay to every parameter, norms and biases too (as torchtitan does)."""

    data_path: list[str] | None = None
    """Prefixes of indexed datasets, or WEIGHT PREFIX pairs; divided by --split."""

    train_data_path: list[str] | None = None
    """Prefixes for training alone, instead of --data-path and --split."""

    valid_data_path: list[str] | None = None
    """Prefixes for validation alone."""

    split: str = "99,1,0"
    """Shares of --data-path for training, validation and test."""

    data_cache_path: str | None = None
    """Folder for the datasets' indices; processes of all nodes must see it (default: beside
    each dataset)."""

    mock_data: bool = False
    """Generated token sequences instead of data."""

    num_workers: int = 2
    """Processes that load data."""

    eod_mask_loss: bool = False
    """Do not score the token that follows an end of document."""

    tokenizer_model: str | None = None
    """Tokenizer: a folder or hub id (Hugging Face), a .model file (SentencePiece), `byte`."""

    tokenizer_type: str | None = None
    """Kind of tokenizer: HuggingFaceTokenizer, SentencePieceTokenizer, ByteLevelTokenizer,
    NullTokenizer (with --vocab-size)."""

    torch_compile: bool = False
    """Compile each layer with PyTorch's compiler at the first step; for GPUs without Transformer
    Engine (on CPUs the kernels are compiled already, and this is slower)."""

    max_skipped_steps: int = 10
    """Steps in a row whose loss or gradient may be nan or infinite, and whose update is left out,
    before the run ends; 0 for any number."""

    rerun_mode: RerunMode = "disabled"
    """validate_results: compute a step again whose loss or gradient is nan or infinite, to tell a
    fault of the machine from one of the run; ends with exit code 16 (to be resumed on another
    machine, which decides) or 17 (decided)."""

    eval_interval: int = 1000
    """Iterations between validations; 0 for none."""

    eval_iters: int = 100
    """Validation steps, each of a global batch; 0 for none."""

    log_interval: int = 1
    """Iterations between lines on the console."""

    save: str | None = None
    """Folder to save checkpoints in."""

    load: str | None = None
    """Folder to load a checkpoint from; the same as --save starts fresh while that is empty."""

    ckpt_step: int | None = None
    """Iteration to load instead of the newest."""

    save_interval: int | None = None
    """Iterations between checkpoints (the last one is always saved)."""

    async_save: bool = False
    """Write checkpoints in the background: training waits only until the weights are copied."""

    keep_last: int | None = None
    """Remove older checkpoints than this many, each time a new one is complete (default: keep
    all)."""

    keep_every: int | None = None
    """With --keep-last: keep those whose iteration is a multiple of this, too."""

    average_last: int | None = None
    """Each time a checkpoint is published, write the mean of the weights of so many of the newest
    to SAVE/averaged (fewer while there are fewer). It is read from disk, each rank a share of the
    tensors: no memory on the device, on the host a model divided by the ranks. --keep-last spares
    what is needed."""

    average_interval: int | None = None
    """With --average-last: iterations between the checkpoints that are averaged, a multiple of
    --save-interval (default: every checkpoint)."""

    no_save_optim: bool = False
    """Leave the optimizer's state out of checkpoints."""

    no_load_optim: bool = False
    """Load weights and position, but start the optimizer anew."""

    finetune: bool = False
    """Load weights only and start at iteration 0, as from a converted model."""

    pretrained_checkpoint: str | None = None
    """Folder whose weights the run starts from, as with --finetune, while --load has no
    checkpoint yet: a run that starts again goes on from its own."""

    exit_interval: int | None = None
    """Save and leave when the iteration is a multiple of this."""

    exit_duration_in_mins: float | None = None
    """Save and leave after so many minutes."""

    metrics_jsonl: str | None = None
    """File for one JSON object an iteration."""

    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""

    wandb_project: str | None = None
    """Weights & Biases project; naming one turns it on."""

    wandb_exp_name: str | None = None
    """Weights & Biases run name."""

    wandb_save_dir: str | None = None
    """Folder for Weights & Biases' files."""

    distributed_timeout_minutes: float = 10.0
    """Minutes that a process waits for the others."""

    engine: EngineName = "megatron"
    """What holds gradients and optimizer: Megatron-Core, or DeepSpeed (tensor and data
    parallelism; needs --deepspeed-config)."""

    deepspeed_config: str | None = None
    """DeepSpeed's configuration, a JSON file: ZeRO stage 0 to 3 and offloading to the CPU. Batches,
    clipping, precision, optimizer and schedule come from the flags."""

    dry_run: bool = False
    """Check everything, print the resolved configuration and leave."""

    # ---- derived -----------------------------------------------------------------------------

    @property
    def decay_iters(self) -> int:
        """Length of the schedule in iterations."""
        return self.lr_decay_iters or self.train_iters

    @property
    def warmup_iters(self) -> float:
        """Length of the warm-up in iterations."""
        if self.lr_warmup_fraction is not None:
            return self.lr_warmup_fraction * self.decay_iters
        return self.lr_warmup_iters or 0

    @property
    def saves_here(self) -> bool:
        """Whether --load continues the run that --save writes."""
        return (
            self.load is not None
            and self.save is not None
            and os.path.realpath(self.load) == os.path.realpath(self.save)
        )

    # ---- checks ------------------------------------------------------------------------------

    def check(self, data_parallel_size: int, lr: float | None, min_lr: float | None) -> None:
        """Raise BadInput for settings that cannot work together."""
        _at_least(1, "--train-iters", self.train_iters)
        _at_least(1, "--micro-batch-size", self.micro_batch_size)
        if self.global_batch_size is None:
            self.global_batch_size = self.micro_batch_size * data_parallel_size
        step = self.micro_batch_size * data_parallel_size
        require(
            self.global_batch_size >= 1 and self.global_batch_size % step == 0,
            f"--global-batch-size: found {self.global_batch_size}; allowed: multiples of "
            f"--micro-batch-size {self.micro_batch_size} x {data_parallel_size} data-parallel "
            f"ranks ({step})",
        )
        for flag, steps in (("--train-iters", self.train_iters), ("--eval-iters", self.eval_iters)):
            samples = steps * self.global_batch_size
            require(
                samples < 2**32,
                f"{flag}: found {steps} x --global-batch-size {self.global_batch_size}; allowed: "
                f"up to {2**32 - 1} samples (masks number them in 32 bits)",
            )
        require(
            0 <= self.num_workers <= 1024,
            f"--num-workers: found {self.num_workers}; allowed: 0 to 1024",
        )
        for flag, number in (
            ("--eval-interval", self.eval_interval),
            ("--eval-iters", self.eval_iters),
            ("--max-skipped-steps", self.max_skipped_steps),
        ):
            _at_least(0, flag, number)
        _at_least(1, "--log-interval", self.log_interval)
        for flag, given in (
            ("--save-interval", self.save_interval),
            ("--keep-last", self.keep_last),
            ("--keep-every", self.keep_every),
            ("--average-last", self.average_last),
            ("--average-interval", self.average_interval),
            ("--exit-interval", self.exit_interval),
            ("--lr-decay-iters", self.lr_decay_iters),
        ):
            if given is not None:
                _at_least(1, flag, given)
        minutes = self.exit_duration_in_mins
        require(
            minutes is None or minutes > 0,
            f"--exit-duration-in-mins: found {minutes}; allowed: above 0",
        )
        minutes = self.distributed_timeout_minutes
        require(
            0.01 <= minutes <= 1e6,
            f"--distributed-timeout-minutes: found {minutes}; allowed: 0.01 to 1e6",
        )
        require(self.ckpt_step is None or self.load is not None, "--ckpt-step: needs --load")
        require(
            self.rerun_mode == "disabled" or self.save is not None,
            f"--rerun-mode {self.rerun_mode}: needs --save",
        )
        self._check_schedule(lr, min_lr)
        self._check_data()
        for flag, value in (
            ("--save-interval", self.save_interval),
            ("--async-save", self.async_save),
            ("--keep-last", self.keep_last),
            ("--average-last", self.average_last),
        ):
            require(not value or self.save is not None, f"{flag}: needs --save")
        require(
            self.keep_every is None or self.keep_last is not None, "--keep-every: needs --keep-last"
        )

        self._check_averaging()

    def _check_averaging(self) -> None:
        every, interval = self.save_interval, self.average_interval
        require(self.average_last is None or bool(every), "--average-last: needs --save-interval")
        require(
            interval is None or self.average_last is not None,
            "--average-interval: needs --average-last",
        )
        require(
            interval is None or every is None or interval % every == 0,
            f"--average-interval: found {interval}; allowed: multiples of --save-interval {every}",
        )

    def _check_schedule(self, lr: float | None, min_lr: float | None) -> None:
        require(lr is not None, "--lr: not given; allowed: a rate above 0")
        assert lr is not None
        require(0 < lr < math.inf, f"--lr: found {lr}; allowed: a rate above 0")
        low = min_lr or 0.0
        require(0 <= low <= lr, f"--min-lr: found {low}; allowed: 0 to --lr ({lr})")
        require(
            0 <= self.lr_warmup_init <= lr,
            f"--lr-warmup-init: found {self.lr_warmup_init}; allowed: 0 to --lr ({lr})",
        )
        require(
            self.lr_warmup_iters is None or self.lr_warmup_fraction is None,
            "--lr-warmup-iters and --lr-warmup-fraction: found both; give one of them",
        )
        fraction = self.lr_warmup_fraction
        require(
            fraction is None or 0 <= fraction < 1,
            f"--lr-warmup-fraction: found {fraction}; allowed: 0 to below 1",
        )
        require(
            0 <= self.warmup_iters < self.decay_iters,
            f"--lr-warmup-iters: found {self.warmup_iters:g}; allowed: 0 to below the schedule's "
            f"{self.decay_iters} iterations",
        )
        if self.lr_decay_style == "WSD":
            annealing = self.lr_wsd_decay_iters
            require(annealing is not None, "--lr-decay-style WSD: needs --lr-wsd-decay-iters")
            assert annealing is not None
            require(
                1 <= annealing <= self.decay_iters - self.warmup_iters,
                f"--lr-wsd-decay-iters: found {annealing}; allowed: 1 to "
                f"{self.decay_iters - self.warmup_iters:g} (the schedule after warm-up)",
            )
        require(
            not (self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler),
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler: found both",
        )

    def _check_data(self) -> None:
        sources = [
            flag
            for flag, value in (
                ("--data-path", self.data_path),
                ("--train-data-path", self.train_data_path),
                ("--mock-data", self.mock_data),
                ("--copy-task", self.copy_task),
            )
            if value
        ]
        require(
            len(sources) == 1,
            f"data: found {' and '.join(sources) or 'none'}; allowed: one of --data-path, "
            "--train-data-path, --mock-data, --copy-task",
        )
        require(
            self.valid_data_path is None or self.train_data_path is not None,
            "--valid-data-path: goes with --train-data-path",
        )
        try:
            shares = [float(share) for share in self.split.split(",")]
        except ValueError:
            shares = []
        require(
            1 <= len(shares) <= 3 and min(shares) >= 0 and 0 < shares[0] <= sum(shares) < math.inf,
            f"--split: found {self.split}; allowed: up to three shares as in 99,1,0",
        )
        metrics = os.path.dirname(os.path.abspath(self.metrics_jsonl or ""))
        for flag, folder in (
            ("--data-cache-path", self.data_cache_path),
            ("--save", self.save),
            ("--metrics-jsonl", metrics if self.metrics_jsonl else None),
            ("--tensorboard-dir", self.tensorboard_dir),
            ("--wandb-save-dir", self.wandb_save_dir),
        ):
            if folder and os.path.isfile(folder):
                raise BadInput(f"{flag}: found the file {folder}; allowed: a folder")
            if folder and not _can_write(folder):
                raise BadInput(f"{flag}: cannot write to {folder}")


def _at_least(low: int, flag: str, value: int) -> None:
    require(value >= low, f"{flag}: found {value}; allowed: {low} or more")


def _can_write(folder: str) -> bool:
    """Whether the folder, or the nearest one above that exists, takes new files."""
    while not os.path.exists(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    return os.path.isdir(folder) and os.access(folder, os.W_OK)
