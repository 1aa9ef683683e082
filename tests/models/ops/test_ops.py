"""The reference operations: what is rounded, bound and refused.

Families beside transformers show what they compute, and tests of kernels compare kernels with them.
"""

import pytest
import torch

from models import ops
from models.layers.linear import Linear
from models.ops import reference


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_norms_in_half_precision_are_rounded_once() -> None:
    """The digits of a float32 weight must count, too."""
    x, weight = torch.randn(64, 128).bfloat16(), 1 + 0.001 * torch.randn(128)
    exact = ops.rms_norm(x.double().float(), weight, 1e-6)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), exact.bfloat16())
    assert not torch.equal(ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight.bfloat16(), 1e-6))


def test_a_matrix_of_latents_of_another_shape_is_refused() -> None:
    for shape in [(18, 12), (34, 12), (33, 13)]:
        with pytest.raises(ValueError, match="does not make keys of 6 and values for 3 heads"):
            ops.pack_latent(torch.randn(shape), 3, 6, 12)


def test_layers_see_a_new_binding() -> None:
    layer = Linear(2, 2)
    layer.weight, layer.bias = torch.nn.Parameter(torch.eye(2)), None
    try:
        ops.use({"linear": lambda x, weight, bias, *, kind: x + 41})
        assert layer(torch.ones(1, 2)).tolist() == [[42, 42]]
    finally:
        ops.use({})
    assert layer(torch.ones(1, 2)).tolist() == [[1, 1]]


def test_a_name_that_no_layer_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="no such operation: rms_nrom, use; there are activation"):
        ops.use({"rms_nrom": reference.rms_norm, "use": reference.linear})
    assert ops.rms_norm is reference.rms_norm


def test_unknown_activations_are_named() -> None:
    with pytest.raises(ValueError, match="no activation 'swoosh'; there are silu"):
        ops.activation(torch.zeros(1), "swoosh")


@pytest.mark.usefixtures("portable_kernels")
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
def test_the_portable_activations_are_the_reference(kind: str) -> None:
    x = torch.cat([torch.randn(1000) * 4, torch.tensor([0.0, -200.0, 200.0, -88.0, -1e-8])])
    exact = reference.activation(x.double(), kind).float()
    torch.testing.assert_close(ops.activation(x, kind), exact, atol=1e-6, rtol=1e-6)
    half = x.bfloat16()
    assert torch.equal(ops.activation(half, kind), reference.activation(half, kind))


@pytest.mark.usefixtures("portable_kernels")
def test_the_portable_products_are_the_reference() -> None:
    weight, bias = torch.randn(48, 32), torch.randn(48)
    for rows in (0, 1, 2, 50):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(ops.linear(x, weight, bias), reference.linear(x, weight, bias))
        half = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
        assert torch.equal(ops.linear(*half), reference.linear(*half))


@pytest.mark.usefixtures("portable_kernels")
def test_the_portable_ones_refuse_activations_by_the_same_words() -> None:
    with pytest.raises(ValueError, match="no activation 'swoosh'; there are silu"):
        ops.gated(torch.zeros(1, 2), "swoosh")
