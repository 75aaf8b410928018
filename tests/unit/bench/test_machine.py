from __future__ import annotations

import json

import pytest
import torch

from robustdist.bench.machine import bf16_units, describe_machine, installed_version, processor_name

CPU = torch.device("cpu")
X86 = """processor\t: 0
model name\t: Some CPU
flags\t\t: fpu avx512f avx512_bf16 amx_bf16

processor\t: 1
model name\t: Another CPU
flags\t\t: fpu
"""


@pytest.mark.parametrize(
    ("text", "units"),
    [
        (X86, ["amx_bf16", "avx512_bf16"]),
        ("model name : Old\nflags : fpu avx2 not_bf16\n", []),
        ("Features : fp asimd bf16\n", ["bf16"]),
        ("processor : 0\n", None),
    ],
)
def test_bf16_units_come_from_the_flags(tmp_path, text, units):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert bf16_units(CPU, path) == units


def test_without_cpuinfo_nothing_is_claimed(tmp_path):
    assert bf16_units(CPU, tmp_path / "missing") is None
    assert processor_name(CPU, tmp_path / "missing")


def test_processor_name(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(X86)
    assert processor_name(CPU, path) == "Some CPU"


def test_description_is_plain_and_complete():
    machine = describe_machine(CPU)
    assert json.loads(json.dumps(machine)) == machine
    assert machine["device"] == "cpu"
    assert machine["torch"] == torch.__version__


def test_version_of_a_missing_package():
    assert installed_version("no-such-package-anywhere") is None
    assert installed_version("torch") is not None
