"""Is a robust accuracy to be trusted? Checks that run attacks of their own, and curves; needs no Trainer."""

from robustdist.diagnostics.examine import Diagnosis, examine, not_run
from robustdist.diagnostics.run import diagnose, with_diagnosis
from robustdist.diagnostics.subset import Part, Subset

__all__ = ["Diagnosis", "Part", "Subset", "diagnose", "examine", "not_run", "with_diagnosis"]
