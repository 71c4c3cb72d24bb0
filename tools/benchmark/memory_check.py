"""Compare computed memory and messages with small runs on this machine, rank by rank.

`tools/benchmark/memory.py --check` calls `check`, which starts this file as the processes of the
runs. A tensor counts from the operation that returns it until its storage is freed, so what is
measured is exact on any machine; what a kernel or the communication library takes for itself does
not count.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lengen.errors import require, run_main
from megatron_lengen.models.build import build_chunks
from megatron_lengen.runtime import distributed, host
from megatron_lengen.sizing.layouts import size
from megatron_lengen.training.arguments import Settings, parse_settings
from megatron_lengen.training.loop import Trainer

# Small, yet its tensors dwarf what is not counted.
MODEL = """
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8
    --num-query-groups 2 --swiglu --disable-bias-linear --vocab-size 4096 --seq-length 256
    --no-rope-freq 4 --dropout-variant vpad --dropout-rate 0.3 --micro-batch-size 2
    --mock-data --tokenizer-type NullTokenizer --num-workers 0 --train-iters 2 --lr 1e-3
    --eval-iters 0
"""
# Processes -> what is added to the model, one run each; the first few make the quick check.
CASES = {
    1: (
        "--bf16 --recompute-granularity selective",
        "--recompute-granularity full --vocab-size 512",
        "--seq-length 512 --sliding-window 128 --window-attn-skip-freq 4",
        "",
        "--seq-length 512",
        "--bf16 --vocab-size 512",
        "--vocab-size 4000 --num-query-groups 8",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--recompute-granularity selective --recompute-modules core_attn mlp --seq-length 512",
    ),
    2: (
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --global-batch-size 8",
        "--use-distributed-optimizer --bf16",
        "--context-parallel-size 2",
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --seq-length 512",
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full",
        "--pipeline-model-parallel-size 2 --global-batch-size 8 "
        "--num-virtual-stages-per-pipeline-rank 2 --untie-embeddings-and-output-weights",
        "--context-parallel-size 2 --recompute-granularity selective --seq-length 512 "
        "--sliding-window 128 --window-attn-skip-freq 4",
        "--global-batch-size 8",
    ),
}
QUICK = {1: 3, 2: 4}
# Shares by which a prediction may be off: of what stays between steps, of what comes on top, of
# the messages.
STATE, ACTIVATIONS, MESSAGES = 0.01, 0.1, 0.001


class Comparison(NamedTuple):
    """Prediction over measurement on one rank of one run.

    Args:
        processes, flags, rank: which.
        state: of what stays between steps.
        activations: of what comes on top at the highest point.
        messages: of the bytes sent in a step; 1 where there are none.
        state_bytes, peak_bytes: as measured.
    """

    processes: int
    flags: str
    rank: int
    state: float
    activations: float
    messages: float
    state_bytes: int
    peak_bytes: int

    @property
    def holds(self) -> bool:
        """Whether all three are within the tolerances."""
        return (
            abs(self.state - 1) <= STATE
            and abs(self.activations - 1) <= ACTIVATIONS
            and abs(self.messages - 1) <= MESSAGES
        )


def check(quick: bool) -> list[Comparison]:
    """Run the cases (with `quick`, a few) and compare every rank."""
    found = []
    for processes, cases in CASES.items():
        cases = cases[: QUICK[processes]] if quick else cases
        runs = [shlex.split(f"{MODEL} {case}") for case in cases]
        for rank, results in enumerate(_run(runs, processes)):
            for case, flags, measured in zip(cases, runs, results, strict=True):
                found.append(_compare(case, flags, processes, rank, measured))
    return found


def _compare(
    case: str, flags: list[str], processes: int, rank: int, measured: dict[str, Any]
) -> Comparison:
    sizing = size(flags, processes, device=host.device().type)
    stage = rank * len(sizing.stages) // processes  # ranks of a stage are consecutive
    memory = sizing.stages[stage]
    require(
        memory.parameters == measured["parameters"],
        f"{case}: {memory.parameters} parameters counted, {measured['parameters']} built",
    )
    sent, on_top = measured["sent"], measured["peak"] - measured["state"]
    return Comparison(
        processes=processes,
        flags=case or "(nothing)",
        rank=rank,
        state=memory.state / measured["state"],
        activations=(memory.activations + memory.working) / on_top,
        messages=sum(sizing.traffic[stage]) / sent if sent else 1.0,
        state_bytes=measured["state"],
        peak_bytes=measured["peak"],
    )


def _run(runs: list[list[str]], processes: int) -> list[list[dict[str, Any]]]:
    """What each rank measured in each run, all runs in one set of processes."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps(runs))
        torchrun = ["torch.distributed.run", "--standalone", "--local-addr=localhost"]
        done = subprocess.run(
            [sys.executable, "-m", *torchrun, f"--nproc-per-node={processes}", __file__, folder],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]


# ---- in the processes of the runs ----------------------------------------------------------------


class LiveTensors(TorchDispatchMode):
    """Follows every tensor that an operation returns until its storage is freed.

    `live` and `peak` are bytes, `sent` the bytes that this rank sends, as in a ring: an all-gather
    or reduce-scatter among n ranks sends (n - 1) / n of the whole tensor, an all-reduce both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.sent = 0
        self._storages: dict[int, weakref.ref] = {}

    def restart(self) -> None:
        """Forget the highest point and the messages so far."""
        self.peak, self.sent = self.live, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operation and note what it returns or sends."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.sent += _bytes_sent(func.__name__, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def _bytes_sent(name: str, args: tuple) -> int:
    """Bytes that this rank sends for one call of torch.distributed."""
    group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    ranks = dist.ProcessGroup.unbox(group).size()
    ring = (ranks - 1) / ranks
    shares = {"allreduce": 2 * ring, "allgather": ring, "reduce_scatter": ring, "send": 1.0}
    kind = name.removeprefix("_")
    share = next((share for start, share in shares.items() if kind.startswith(start)), 0.0)
    whole = args[1] if kind.startswith("reduce_scatter") else args[0]
    return round(share * sum(t.numel() * t.element_size() for t in tree_leaves(whole)))


def measure(settings: Settings) -> dict[str, int]:
    """Parameters, bytes between steps, highest bytes and bytes sent of the second step."""
    watch = LiveTensors()
    batch = settings.training.global_batch_size
    assert batch is not None
    with watch:
        trainer = Trainer(settings, build_chunks)
        data = trainer._train_data()
        trainer.engine.train(data, 0)
        for chunk in unwrap_model(trainer.engine.chunks):
            chunk.set_input_tensor(None)  # stages remember the last micro-batch they were sent
        gc.collect()
        state = watch.live
        watch.restart()
        trainer.engine.train(data, batch)
    parameters = [p.numel() for chunk in trainer.engine.chunks for p in chunk.parameters()]
    return {
        "parameters": sum(parameters),
        "state": state,
        "peak": watch.peak,
        "sent": watch.sent,
    }


def main() -> None:
    """Measure every run of FOLDER/job.json on this rank; writes FOLDER/RANK.json."""
    folder = Path(sys.argv[1])
    distributed.start_process_group()
    results = []
    for flags in json.loads((folder / "job.json").read_text()):
        settings = parse_settings(flags, "")
        distributed.start(settings.model)
        results.append(measure(settings))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results) + "\n")
    distributed.stop()


if __name__ == "__main__":
    run_main(main)
