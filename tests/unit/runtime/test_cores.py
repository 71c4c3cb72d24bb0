"""Cores for this process, on systems that bind processes and on others."""

from __future__ import annotations

import os

from megatron_lengen.runtime.cores import available_cores


def test_bound_processes_count_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 9}, raising=False)
    assert available_cores() == 3


def test_where_the_system_binds_none_all_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for counted, cores in ((8, 8), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda counted=counted: counted)
        assert available_cores() == cores
