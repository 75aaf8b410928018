"""The command as users start it: own processes, real data, the launchers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

pytestmark = [pytest.mark.standalone, pytest.mark.timeout(600)]


def run(command, cwd, **kwargs):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, **kwargs)


def robustdist(*args, cwd):
    return run([sys.executable, "-m", "robustdist", *map(str, args)], cwd)


@pytest.fixture
def small_config(tmp_path):
    """The quick start on the digits, two epochs."""

    def write(strategy, **report):
        content = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
        content["model"]["init_args"] = {"image_size": 8}
        content["data"]["class_path"] = "robustdist.data.DigitsDataModule"
        content["trainer"].update(strategy=strategy, max_epochs=2, enable_progress_bar=False, logger=False)
        content["report"].update(report)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def test_the_quick_start_of_the_readme(tmp_path):
    """README command 1 without the installation: the main job, its figures and its files."""
    command = re.search(r"&& (robustdist fit .+)", README).group(1).split()[1:]
    config = command.index("--config") + 1
    command[config] = str(ROOT / command[config])
    done = robustdist(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[rank: 1]" in done.stderr + done.stdout
    assert "Starting with 2 processes" in done.stderr + done.stdout
    report = json.loads((tmp_path / "robustdist_report" / "report.json").read_text())
    assert report["num_samples"] == 500
    assert report["clean_acc"] >= 0.95
    assert report["attacks"]["pgd20"]["acc"] >= 0.78
    assert report["robust_acc"] <= report["attacks"]["apgdt"]["acc"] <= report["attacks"]["pgd20"]["acc"]
    control = report["comparison"]["ordinary training"]
    assert control["clean_acc"] >= 0.95
    assert control["attacks"]["pgd20"]["acc"] <= 0.05
    assert all(check["passed"] for check in report["checks"].values())
    assert len(report["history"]) == 15
    table = done.stdout
    assert [word for word in ("ordinary training", "adversarial training", "pgd20", "apgdt") if word not in table] == []
    assert "robustdist_report/report.html" in table
    for name in ("report.html", "curves.png", "examples.png", "attacks.png"):
        assert (tmp_path / "robustdist_report" / name).stat().st_size > 10_000


def test_results_come_back_from_forked_workers_and_evaluate_repeats_them(tmp_path, small_config):
    config = small_config("ddp_fork", dir="out", control=True)
    as_written = config.read_text()
    done = robustdist("fit", "--config", config, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert config.read_text() == as_written  # without a logger there is no place to save the parsed one
    fitted = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(fitted["comparison"]) == {"ordinary training", "adversarial training"}
    assert len(fitted["history"]) == 2
    assert fitted["stage"] == "test"
    assert fitted["model"] == "SmallConvNet"
    # the ordinary epochs are the cheaper ones: starting processes and validation are not counted
    ordinary, adversarial = (fitted["train_seconds"][name] for name in ("ordinary training", "adversarial training"))
    assert 0 < ordinary < adversarial

    # the control's checkpoint lies apart, chosen by the same monitor
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.ckpt")
    assert len(list((tmp_path / "out" / "control" / "checkpoints").glob("*.ckpt"))) == 1
    assert Path(fitted["checkpoint"]) == checkpoint
    # one process instead of two, and another batch size: the verdicts of our own attack are the same
    one = ["--trainer.strategy", "auto", "--trainer.devices", "1", "--data.batch_size", "37"]
    done = robustdist(
        "evaluate", "--config", config, *one, "--ckpt_path", checkpoint, "--report_dir", "again", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "again" / "report.json").read_text())
    assert again["num_samples"] == fitted["num_samples"]
    assert again["clean_acc"] == fitted["clean_acc"]
    assert again["attacks"]["pgd20"]["acc"] == fitted["attacks"]["pgd20"]["acc"]


def test_wrong_images_end_a_forked_run_with_one_line(tmp_path, small_config):
    (tmp_path / "wrong.py").write_text(
        "from robustdist.data import DigitsDataModule\n"
        "class Bytes(DigitsDataModule):\n"
        "    def load(self):\n"
        "        parts = super().load()\n"
        "        return type(parts)(*(type(part)(part.tensors[0] * 255, part.tensors[1]) for part in parts))\n"
    )
    config = small_config("ddp_fork", dir="out", control=False)
    done = robustdist("fit", "--config", config, "--data", "wrong.Bytes", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("robustdist: error: the images span [0, 255] but bounds=(0.0, 1.0)")
    assert "mean and std" in last


def test_the_python_blocks_of_the_readme_run(tmp_path):
    blocks = re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip() and "import" not in line]) <= 10
    done = run([sys.executable, "-c", "\n".join(blocks)], tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_file_that_the_readme_names_exists():
    named = set(re.findall(r"(?:configs|docs|examples)/[\w/.-]+\w|CONTRIBUTING\.md", README))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


#: Files that are no scripts, or need data that pip does not install: robust_text, which tests/unit/bench/test_text.py
#: runs, quantized_data, whose strategy tests/integration/test_quantized_data.py runs, and domain_reweighting, which
#: tests/integration/test_domain_reweighting.py runs.
NOT_ALONE = {"classifiers", "domain_reweighting", "quantized_data", "robust_text"}


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem not in NOT_ALONE)
)
def test_each_example_runs(tmp_path, name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    assert len(lines) < 80
    done = run([sys.executable, "-m", f"examples.{name}"], tmp_path)
    assert done.returncode == 0, done.stderr
