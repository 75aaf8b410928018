import pytest

from robustdist.core.ranks import failing_together
from robustdist.core.testing import run_ranks
from robustdist.errors import UsageError


def outcome(fails):
    def work(rank):
        try:
            with failing_together():
                if rank in fails:
                    raise UsageError(f"eps of {rank} is wrong")
        except UsageError as error:
            return str(error), error.shared
        return None

    return run_ranks(work)


def test_nothing_happens_when_nobody_fails():
    assert outcome(set()) == [None, None]


def test_everybody_fails_with_the_sentence_of_the_one():
    assert outcome({1}) == [("eps of 1 is wrong (process 1)", True)] * 2


def test_the_first_of_several_sentences_is_told():
    assert outcome({0, 1}) == [("eps of 0 is wrong (process 0)", True)] * 2


def test_one_process_fails_as_usual():
    with pytest.raises(UsageError, match=r"^steps: mend it$"), failing_together():
        raise UsageError("steps: mend it")


def test_other_errors_pass_through():
    with pytest.raises(ZeroDivisionError), failing_together():
        _ = 1 / 0
