"""All kinds of model check the shapes of a call."""

import pytest
import torch

from tests.helpers import tiny_model


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tokens(*shape):
    return torch.randint(13, shape)


def test_shapes_that_do_not_fit_are_named():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"mems of 3 rows and 2 layers must fit ids of 2 rows and a model of 2 layers; use"):
        model(tokens(2, 3), mems=model.init_mems(3))
    with pytest.raises(ValueError, match=r"labels \(2, 2\) must have the shape of ids \(2, 3\)"):
        model(tokens(2, 3), labels=tokens(2, 2))
    with pytest.raises(ValueError, match=r"ids \(3,\) must have shape"):
        model(tokens(3))
