"""tests/host/test_interop_torch.py on a GPU: a C2PSA trains through the fused kernels as through eager PyTorch."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing but this bridge needs it")
checks = pytest.importorskip("test_interop_torch")

from numba_psa import DTypeError  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_in_every_dtype(dtype):
    checks.gradients_are_right("cuda", dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_training_follows_eager_pytorch(dtype, tolerance):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    checks.training_follows_eager_pytorch("cuda", dtype, 20, tolerance)


def test_a_tensor_on_the_device_is_for_cuda():
    with pytest.raises(DTypeError, match="impl='cuda' takes that"):
        checks.bridge.psa_attention(torch.zeros(1, 8, 2, 2, device="cuda"), 1, impl="oracle")
