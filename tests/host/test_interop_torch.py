"""The bridge to PyTorch's autograd: gradcheck through the oracle, and a training run that follows eager PyTorch's.

Here on the CPU; tests/gpu/test_torch_bridge.py asks the same of a GPU.
"""

import numpy as np
import pytest

from numba_psa import DTypeError, ShapeError, oracle

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing but this bridge needs it")
bridge = pytest.importorskip("numba_psa.interop.torch")
nn, functional = torch.nn, torch.nn.functional


class Attention(nn.Module):
    """qkv, pe and proj as 1x1, depthwise 3x3 and 1x1 convolutions; attention written out in PyTorch."""

    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (channels // num_heads // 2) ** -0.5
        self.qkv = nn.Conv2d(channels, 2 * channels, 1)
        self.pe = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        batch, channels, height, width = x.shape
        heads = self.qkv(x).view(batch, self.num_heads, -1, height * width)
        key_dim = heads.shape[2] // 4
        q, k, v = heads.split([key_dim, key_dim, 2 * key_dim], dim=2)
        p = ((q.mT @ k) * self.scale).softmax(-1)
        image = batch, channels, height, width
        return self.proj((v @ p.mT).reshape(image) + self.pe(v.reshape(image)))


class Fused(Attention):
    forward = bridge.attention_forward


class C2PSA(nn.Module):
    """One PSA block between two 1x1 convolutions, and a head for a class of each image."""

    def __init__(self, attention, channels=128, num_heads=2, classes=10):
        super().__init__()
        half = channels // 2
        self.cv1, self.cv2 = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.attention = attention(half, num_heads)
        self.ffn = nn.Sequential(nn.Conv2d(half, 2 * half, 1), nn.SiLU(), nn.Conv2d(2 * half, half, 1))
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        a, b = functional.silu(self.cv1(x)).chunk(2, dim=1)
        b = b + self.attention(b)
        b = b + self.ffn(b)
        return self.head(functional.silu(self.cv2(torch.cat((a, b), dim=1))).mean((2, 3)))


@pytest.mark.parametrize("scale", [None, -0.3])
def test_gradcheck_through_the_oracle(scale):
    torch.manual_seed(0)
    qkv = torch.randn(2, 16, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: bridge.psa_attention(x, 2, softmax_scale=scale, impl="oracle"), (qkv,))


def gradients_are_right(device, dtype):
    torch.manual_seed(1)
    qkv = torch.randn(2, 64, 5, 6, device=device).to(dtype).requires_grad_(True)
    d_out = torch.randn(2, 32, 6, 5, device=device).to(dtype).mT  # strided
    bridge.psa_attention(qkv, 2).backward(d_out)
    assert qkv.grad.dtype == dtype
    want = oracle.psa_attention_backward(qkv.detach().double().cpu().numpy(), d_out.double().cpu().numpy(), 2)
    error = np.linalg.norm(qkv.grad.double().cpu().numpy() - want) / np.linalg.norm(want)
    assert error < {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_in_every_dtype(dtype):
    gradients_are_right("cpu", dtype)


def losses(attention, device, dtype, side, steps=20):
    """Of a C2PSA of random weights on random images and labels, by SGD."""
    torch.manual_seed(2)
    model = C2PSA(attention).to(device)
    images, labels = torch.randn(16, 128, side, side).to(device), torch.randint(10, (16,)).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found = []
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            loss = functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


def training_follows_eager_pytorch(device, dtype, side, tolerance):
    ours, theirs = losses(Fused, device, dtype, side), losses(Attention, device, dtype, side)
    assert ours[-1] < ours[0] - 0.02
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)


def test_training_follows_eager_pytorch():
    training_follows_eager_pytorch("cpu", torch.float32, 6, 1e-4)


def test_errors_name_what_is_wrong():
    with pytest.raises(ShapeError, match="multiple of"):
        bridge.psa_attention(torch.zeros(1, 9, 2, 2), 2)
    with pytest.raises(DTypeError, match=r"must be a torch\.Tensor"):
        bridge.psa_attention(np.zeros((1, 8, 2, 2)), 1)
    qkv = torch.zeros(1, 8, 2, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad((bridge.psa_attention(qkv, 1) ** 2).sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
