"""Two machines, each with its launch.sh: they train as one process does, and come back."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from launcher import Run, argv, curve, rows, train
from launching import free_port
from nodes import Network, Node, codes, logs, on_loopback, wait_until

from megatron_lengen.data.indexed import DatasetWriter

ITERATIONS = 60


def flags(folder: Path, name: str, more: str = "") -> list[str]:
    """A run of NAME that goes on from its own folder."""
    own = f"--save {folder}/{name} --load {folder}/{name} --metrics-jsonl {folder}/{name}.jsonl"
    return argv(f"{(folder / 'flags').read_text()} {own} {more}")


def tracker(folder: Path, name: str) -> int:
    """The newest checkpoint's iteration, or 0."""
    file = folder / name / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def losses(folder: Path, name: str) -> torch.Tensor:
    """[iterations] fp64, as last computed; steps that were done twice must agree."""
    found: dict[int, float] = {}
    for row in rows(folder / f"{name}.jsonl"):
        loss = found.setdefault(row["iteration"], row["lm_loss"])
        assert row["lm_loss"] == pytest.approx(loss, rel=1e-5)
        found[row["iteration"]] = row["lm_loss"]
    assert sorted(found) == list(range(1, len(found) + 1))
    return torch.tensor([found[i + 1] for i in range(len(found))], dtype=torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data, and the run of one process without an interruption."""
    folder = tmp_path_factory.mktemp("nodes")
    generator = np.random.default_rng(0)
    (folder / "data").mkdir()
    with DatasetWriter(folder / "data/a", np.uint16) as writer:
        lengths = generator.integers(5, 60, 50)
        tokens = generator.integers(0, 100, lengths.sum()).astype(np.uint16)
        writer.add_documents(tokens, lengths)
    common = f"--train-iters {ITERATIONS} --dropout-variant vpad --dropout-rate 0.2"
    common += f" --data-path {folder}/data/a --split 100,0,0"
    (folder / "flags").write_text(common)
    train(folder, 1, [Run("whole", f"{common} --data-cache-path {folder}/shared")])
    return folder


@pytest.fixture(scope="module")
def network():
    try:
        network = Network()
    except OSError as error:
        pytest.skip(str(error))
    yield network
    network.close()


def assert_whole(folder, name):
    found, expected = losses(folder, name), curve(folder / "whole.jsonl")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_signal_ends_all_and_another_layout_goes_on(folder, tmp_path):
    """Data parallel, the machines without numbers; then tensor parallel across them.

    Each machine keeps the data's index in a folder of its own.
    """

    def start(stage: int, layout: str, variables: list[dict[str, str]]) -> list[Node]:
        return [
            Node(
                tmp_path / f"{stage}{rank}.log",
                flags(folder, "layouts", f"{layout} --data-cache-path {tmp_path}/{rank}"),
                variables[rank],
            )
            for rank in range(2)
        ]

    meeting = {"RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "RDZV_ID": "test"}
    machine = {"NNODES": "2", "NPROC_PER_NODE": "1", "MAX_RESTARTS": "1", **meeting}
    nodes = start(0, "", [machine, machine])
    metrics = folder / "layouts.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 3, nodes)
    nodes[1].process.send_signal(signal.SIGUSR1)
    assert codes(nodes) == [0, 0], logs(nodes)
    assert tracker(folder, "layouts") == len(rows(metrics)) < ITERATIONS
    assert "restart" not in "".join(node.text() for node in nodes)

    nodes = start(1, "--tensor-model-parallel-size 2 --sequence-parallel", on_loopback())
    assert codes(nodes) == [0, 0], logs(nodes)
    assert tracker(folder, "layouts") == ITERATIONS == len(rows(metrics))
    assert "2 processes (TP 2, PP 1, DP 1)" in nodes[0].text() and nodes[1].text() == ""
    assert_whole(folder, "layouts")
    names = [sorted(file.name for file in (tmp_path / str(rank)).iterdir()) for rank in (0, 1)]
    assert names[0] == names[1] != []


def test_a_machine_is_lost_and_comes_back(folder, network, tmp_path):
    """Machines with names that nobody can look up, read-only data and caches of their own."""
    (folder / "own").mkdir()
    mine = flags(folder, "lost", f"--save-interval 10 --data-cache-path {folder}/own")

    def start(rank: int) -> Node:
        variables = {**network.variables(rank), "MAX_RESTARTS": "1"}
        inside = network.inside(rank, folder / "own", folder / "data")
        return Node(tmp_path / f"{rank}.log", mine, variables, inside)

    nodes = [start(0), start(1)]
    wait_until(lambda: tracker(folder, "lost") >= 10, nodes)
    nodes[1].kill()
    nodes[1] = start(1)
    assert codes(nodes) == [0, 0], logs(nodes)
    assert nodes[0].text().count("restart ") == nodes[0].text().count("restart 1 of 1: ") == 1
    assert f"loaded {folder}/lost/iter_0000" in nodes[0].text() + nodes[1].text()
    assert tracker(folder, "lost") == ITERATIONS
    assert_whole(folder, "lost")
    assert list((folder / "own").iterdir()) == []


def test_read_only_data_without_a_cache_is_one_line(folder, network, tmp_path):
    (folder / "none").mkdir()
    nodes = [
        Node(
            tmp_path / f"{rank}.log",
            flags(folder, "refused"),
            {**network.variables(rank), "MAX_RESTARTS": "1"},
            network.inside(rank, folder / "none", folder / "data"),
        )
        for rank in range(2)
    ]
    assert codes(nodes) == [2, 2], logs(nodes)
    said = [line for node in nodes for line in node.text().splitlines() if "error:" in line]
    assert [line for line in said if "--data-cache-path" in line] == said[:1], logs(nodes)
    assert "Read-only file system" in said[0]
