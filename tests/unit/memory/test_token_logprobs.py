"""Chunked log-probabilities against log_softmax over full logits."""

from __future__ import annotations

import pytest
import torch

from traceforge.memory.token_logprobs import Head, token_logprobs

N, D, V = 23, 16, 57


def make_head(*, trained=False, bias=True, scale=1.0, softcap=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_(trained)
    offset = torch.randn(V, generator=generator, dtype=dtype).requires_grad_(trained) if bias else None
    return Head(weight, offset, scale, softcap, dtype)


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, generator=generator, dtype=dtype).requires_grad_(True)
    return hidden, torch.randint(0, V, (N,), generator=generator), torch.randn(N, generator=generator, dtype=dtype)


def full_logits_logp(hidden, targets, head):
    logits = hidden @ head.weight_VD.T + (0 if head.bias_V is None else head.bias_V)
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits.log_softmax(-1)[torch.arange(len(targets)), targets]


def gradients_of(function, hidden, head, upstream):
    wanted = [tensor for tensor in (hidden, head.weight_VD, head.bias_V) if tensor is not None and tensor.requires_grad]
    return torch.autograd.grad((function() * upstream).sum(), wanted)


@pytest.mark.parametrize("chunk", [1, 4, N, 1000])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "variant", [{}, {"bias": False}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}]
)
def test_values_and_gradients_equal_full_logits(chunk, trained, variant):
    head = make_head(trained=trained, **variant)
    hidden, targets, upstream = inputs()
    ours = token_logprobs(hidden, targets, head, chunk_tokens=chunk)
    torch.testing.assert_close(ours, full_logits_logp(hidden, targets, head), rtol=1e-12, atol=1e-12)
    found = gradients_of(lambda: token_logprobs(hidden, targets, head, chunk_tokens=chunk), hidden, head, upstream)
    wanted = gradients_of(lambda: full_logits_logp(hidden, targets, head), hidden, head, upstream)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_token_weights_reach_the_gradient():
    """A fused loss that uses only the first upstream gradient has the right value and a wrong gradient."""
    head = make_head()
    hidden, targets, _ = inputs()
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    hidden, targets = hidden[:3].detach().requires_grad_(True), targets[:3]
    (token_logprobs(hidden, targets, head, chunk_tokens=2) * weights).sum().backward()
    wanted = torch.autograd.grad((full_logits_logp(hidden, targets, head) * weights).sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, wanted)


def test_no_trained_position_gives_an_empty_result():
    head = make_head()
    hidden = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    logp = token_logprobs(hidden, torch.zeros(0, dtype=torch.long), head, chunk_tokens=8)
    assert logp.shape == (0,)
    logp.sum().backward()


def test_logits_of_one_chunk_only_are_ever_alive():
    """The forward of a frozen head allocates chunk x V at a time, not N x V: the largest tensor made tells."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for each in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(each, torch.Tensor) and each.shape[-1:] == (V,) and each.shape[0] not in (V, D):
                    self.elements = max(self.elements, each.numel())
            return result

    head = make_head(dtype=torch.float32)
    hidden, targets, _ = inputs(torch.float32)
    with Largest() as seen:
        token_logprobs(hidden, targets, head, chunk_tokens=4).sum().backward()
    assert 0 < seen.elements <= 4 * V
