"""The worked example of CONTRIBUTING is the file it says it is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_attack_is_quoted_whole_and_short():
    (quoted,) = re.findall(r"```python\n(.+?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    source = (ROOT / "robustdist" / "attacks" / "mifgsm.py").read_text()
    assert quoted == source
    assert len(source.splitlines()) <= 40


def test_its_row_stands_in_the_family_table():
    (row,) = re.findall(r"`(Row\(.+?\))`;?", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    assert " ".join(row.split()) in (ROOT / "tests" / "unit" / "attacks" / "test_family.py").read_text()
