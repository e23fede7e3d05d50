"""Products by oneDNN are those of torch, forwards and backwards, for every layout, and go away again."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, ROOT, last_checkpoint
from safetensors.torch import load_file

from lightrlhf import sft
from lightrlhf.cpu import products


@pytest.fixture
def replaced():
    """oneDNN's products whatever the processor; those before it afterwards."""
    before = bool(products._replaced)
    products.restore_products()
    products.replace_products()
    yield
    products.restore_products()
    if before:
        products.replace_products()


def layouts(rows: int, columns: int) -> list[torch.Tensor]:
    """Matrices of float64 with the strides that models and their gradients make."""
    generator = torch.Generator().manual_seed(rows * columns)
    one = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    wide = torch.randn(rows, 2 * columns, generator=generator, dtype=torch.float64)
    expanded = torch.randn(1, columns, generator=generator, dtype=torch.float64).expand(rows, columns)
    scalar = torch.ones((), dtype=torch.float64).expand(rows, columns)
    return [one, one.t().contiguous().t(), wide[:, :columns], wide[:, ::2], expanded, scalar]


def as_float(matrix: torch.Tensor) -> torch.Tensor:
    """The same in float32 with the same strides."""
    out = torch.empty_strided(matrix.shape, matrix.stride(), dtype=torch.float32)
    base = torch.as_strided(out, (out.untyped_storage().nbytes() // 4,), (1,))
    base.copy_(torch.as_strided(matrix, base.shape, (1,)))
    return out


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (64, 33, 129), (129, 33, 5), (2, 64, 1)])
def test_every_layout_equals_the_product_in_float64(shape, replaced):
    rows, inner, columns = shape
    for one in layouts(rows, inner):
        for other in layouts(inner, columns):
            bias = torch.linspace(-1, 1, columns).double()
            torch.testing.assert_close(as_float(one) @ as_float(other), (one @ other).float(), atol=1e-4, rtol=1e-4)
            found = torch.addmm(bias.float(), as_float(one), as_float(other))
            torch.testing.assert_close(found, torch.addmm(bias, one, other).float(), atol=1e-4, rtol=1e-4)


def test_what_onednn_does_not_take_is_left_to_torch(replaced):
    assert (torch.ones(0, 4) @ torch.ones(4, 3)).shape == (0, 3)
    assert torch.equal(torch.ones(2, 0) @ torch.ones(0, 3), torch.zeros(2, 3))
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        product = torch.ones(2, 4, dtype=dtype) @ torch.ones(4, 3, dtype=dtype)
        assert torch.equal(product, torch.full((2, 3), 4, dtype=dtype))
    full, one = torch.ones(2, 3), torch.ones(2, 2)
    assert torch.equal(torch.addmm(full, one, torch.ones(2, 3), beta=2, alpha=3), torch.full((2, 3), 8.0))
    for words in ((torch.ones(2, 3), torch.ones(2, 3)), (torch.ones(2, 3), torch.ones(3, 3).double())):
        with pytest.raises(RuntimeError):
            torch.mm(*words)


def test_gradients_equal_those_in_float64(replaced):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(24, 40), torch.randn(2, 9, 24, requires_grad=True)
    double, y = torch.nn.Linear(24, 40).double(), x.detach().double().requires_grad_()
    double.load_state_dict(layer.state_dict())
    for module, values in ((layer, x), (double, y)):
        module(values).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad.float(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(layer.weight.grad, double.weight.grad.float(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(layer.bias.grad, double.bias.grad.float(), atol=1e-4, rtol=1e-5)


def test_products_are_replaced_by_the_processor_alone_and_once(monkeypatch):
    before = list(products._replaced)
    monkeypatch.setattr(products, "_replaced", [])
    made: list[int] = []
    monkeypatch.setattr(products, "replace_products", lambda: made.append(1))
    monkeypatch.setattr(products, "mkl_is_slow", lambda: False)
    products.use_onednn()
    assert not made
    monkeypatch.setattr(products, "mkl_is_slow", lambda: True)
    products.use_onednn()
    assert made
    monkeypatch.setattr(products, "_replaced", before or [object()])
    products.use_onednn()
    assert len(made) == 1


def test_products_stay_where_torch_has_no_such_operator(monkeypatch):
    monkeypatch.setattr(products, "_replaced", [])
    for module, name, value in (
        (torch.backends.mkl, "is_available", True),
        (torch.backends.mkldnn, "is_available", True),
        (torch.backends.cpu, "get_cpu_capability", "AVX512"),
        (products.Path, "is_file", True),
        (products.Path, "read_text", "vendor_id : AuthenticAMD"),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    assert products.mkl_is_slow()
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not products.mkl_is_slow()
    products.use_onednn()
    assert not products._replaced


@pytest.mark.slow
def test_training_with_either_is_the_same_up_to_rounding(cafe_data, base_model, tmp_path, replaced, monkeypatch):
    monkeypatch.setattr(products, "mkl_is_slow", lambda: False)
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--max_steps", "2", *CPU]
    one = sft.main([*flags, "--output_dir", str(tmp_path / "onednn")])
    products.restore_products()
    other = sft.main([*flags, "--output_dir", str(tmp_path / "torch")])
    weights = [load_file(last_checkpoint(folder) / "model.safetensors") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=1e-4, rtol=1e-3)


GROWTH = """
import resource, sys, torch
from lightrlhf.cpu import products
products.replace_products()
one, other = torch.ones(2048, 64), torch.ones(64, 300)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
for rows in range(100):
    one[:rows + 1] @ other
before = peak()
for rows in range(100, 1500):
    one[:rows + 1] @ other
print(peak() - before)
"""


@pytest.mark.slow
def test_products_of_many_shapes_keep_few_kernels():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, cwd=ROOT, check=True)
    assert float(done.stdout) < 100  # MiB; 540 with a thousand kernels
