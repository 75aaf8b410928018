import sys

import pytest

from robustdist.cli import main


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command in this process; returns exit status, standard output and the last line of standard error."""
    monkeypatch.setattr(sys, "argv", ["robustdist"])

    def run(*args):
        status = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if line.startswith("robustdist: error:")]
        assert "Traceback" not in captured.err
        return status, captured.out, lines

    return run
