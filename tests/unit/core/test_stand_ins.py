import pytest
import torch
from torch import nn

from robustdist.core.stand_ins import stand_ins


@pytest.mark.parametrize("fails", [False, True])
def test_attributes_are_replaced_and_come_back(fails):
    linear = nn.Linear(2, 2)
    weight, state = linear.weight, {name: value.clone() for name, value in linear.state_dict().items()}
    other = torch.zeros(2, 2)
    try:
        with stand_ins({(linear, "weight"): other, (linear, "forward"): lambda x: x + 1}):
            assert linear.weight is other
            assert next(iter(linear.parameters())) is weight
            assert torch.equal(linear.state_dict()["weight"], state["weight"])
            assert torch.equal(linear(torch.ones(1)), torch.full((1,), 2.0))
            if fails:
                raise KeyError("x")
    except KeyError:
        assert fails
    assert linear.weight is weight
    assert not {"weight", "forward"} & set(vars(linear))


def test_contexts_nest_and_keep_what_the_instance_had():
    linear = nn.Linear(2, 2)
    own = vars(linear)["forward"] = lambda x: x
    with stand_ins({(linear, "forward"): lambda x: 2 * x}):
        with stand_ins({(linear, "forward"): lambda x: 3 * x}):
            assert linear(torch.ones(1)) == 3
        assert linear(torch.ones(1)) == 2
    assert vars(linear)["forward"] is own


def test_an_attribute_that_the_code_inside_removed_is_no_fault():
    linear = nn.Linear(2, 2)
    with stand_ins({(linear, "weight"): torch.zeros(2, 2)}):
        del vars(linear)["weight"]
    assert isinstance(linear.weight, nn.Parameter)
