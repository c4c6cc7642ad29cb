"""Products of bfloat16 in float32, in a process of its own: its kernels would be every other test's."""

import subprocess
import sys

PROGRAM = """
import torch
from torch.nn.functional import linear

torch.manual_seed(0)
x, w, b = torch.randn(3, 7, 24), torch.randn(16, 24), torch.randn(16)
before = linear(x, w, b), x[0] @ x[1].T, x @ x.transpose(1, 2)

from horizonrl.learner.engine.model.float32_matmul import widen_products
widen_products(), widen_products()

for old, new in zip(before, (linear(x, w, b), x[0] @ x[1].T, x @ x.transpose(1, 2))):
    assert torch.equal(old, new), "float32 is multiplied as before"

x, w, b = (each.bfloat16() for each in (x, w, b))
rounded = lambda wide: wide.bfloat16()
assert torch.equal(x[0] @ x[1].T, rounded(x[0].float() @ x[1].float().T)), "mm"
assert torch.equal(linear(x, w), rounded(linear(x.float(), w.float()))), "mm, three axes"
assert torch.equal(linear(x, w, b), rounded(linear(x.float(), w.float(), b.float()))), "addmm: one rounding"
assert torch.equal(x @ x.transpose(1, 2), rounded(x.float() @ x.float().transpose(1, 2))), "bmm"
added = torch.baddbmm(x[:, :, :7], x, x.transpose(1, 2), beta=0.5, alpha=2.0)
wide = torch.baddbmm(x[:, :, :7].float(), x.float(), x.float().transpose(1, 2), beta=0.5, alpha=2.0)
assert torch.equal(added, rounded(wide)), "baddbmm, with its factors"

x.requires_grad_(), w.requires_grad_()
y = linear(x, w)
gradient = torch.randn(y.shape).bfloat16()
y.backward(gradient)
flat = gradient.reshape(-1, 16).float()
assert w.grad.dtype is x.grad.dtype is torch.bfloat16
assert torch.equal(w.grad, rounded(flat.T @ x.detach().reshape(-1, 24).float())), "backward, weight"
assert torch.equal(x.grad.reshape(-1, 24), rounded(flat @ w.detach().float())), "backward, input"
print("same")
"""


def test_a_product_is_that_of_float32_rounded_once_forward_and_backward() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr
