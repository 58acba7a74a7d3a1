"""The sliced output head against plain float64 torch and its autograd."""

import pytest
import torch

from opentinker.server.trainer import head

ROWS, HIDDEN, VOCABULARY = 40, 16, 900


SHAPES = pytest.mark.parametrize(("cap", "temperature"), [(0.0, 1.0), (0.0, 0.7), (5.0, 1.3)])


def plain_softmax(hidden: torch.Tensor, weight: torch.Tensor, cap: float, temperature: float) -> torch.Tensor:
    logits = hidden @ weight.t()
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(logits / temperature, 1)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, cap: float, temperature: float) -> torch.Tensor:
    return plain_softmax(hidden, weight, cap, temperature)[torch.arange(len(targets)), targets]


@pytest.fixture
def many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "SLICE_ELEMENTS", ROWS * 256)


@pytest.mark.usefixtures("many_slices")
@SHAPES
def test_logprobs_and_gradients_are_those_of_the_whole_softmax(cap: float, temperature: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN).requires_grad_(), torch.randn(VOCABULARY, HIDDEN)
    targets, gradient = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(ROWS)
    weight_grad = torch.ones_like(weight)  # what is there already stays
    logprobs = head.target_logprobs(hidden, weight, targets, weight_grad, cap=cap, temperature=temperature)
    logprobs.backward(gradient)
    hidden64, weight64 = hidden.detach().double().requires_grad_(), weight.double().requires_grad_()
    expected = plain(hidden64, weight64, targets, cap, temperature)
    expected.backward(gradient.double())
    assert hidden64.grad is not None
    assert weight64.grad is not None
    torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, hidden64.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight_grad - 1, weight64.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("many_slices")
@SHAPES
def test_gradients_of_entropies_are_those_of_the_whole_softmax(cap: float, temperature: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN).requires_grad_(), torch.randn(VOCABULARY, HIDDEN)
    targets, gradients = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(2, ROWS)
    weight_grad = torch.ones_like(weight)
    both = head.logprobs_and_entropies(hidden, weight, targets, weight_grad, cap=cap, temperature=temperature)
    torch.autograd.backward(both, list(gradients))
    hidden64, weight64 = hidden.detach().double().requires_grad_(), weight.double().requires_grad_()
    logprobs64 = plain_softmax(hidden64, weight64, cap, temperature)
    chosen, entropies = logprobs64[torch.arange(ROWS), targets], -(logprobs64.exp() * logprobs64).sum(1)
    torch.autograd.backward((chosen, entropies), list(gradients.double()))
    assert hidden64.grad is not None
    assert weight64.grad is not None
    torch.testing.assert_close(hidden.grad, hidden64.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight_grad - 1, weight64.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("many_slices")
def test_extreme_logits_stay_finite() -> None:
    hidden = (torch.eye(ROWS, HIDDEN) * 300).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))
    weight_grad = torch.zeros_like(weight)
    logprobs = head.target_logprobs(hidden, weight, torch.zeros(ROWS, dtype=torch.long), weight_grad)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert weight_grad.isfinite().all()


def test_a_confident_bfloat16_row_keeps_a_precise_gradient() -> None:
    # softmax - onehot is a difference of near equals here: rounding the softmax first would lose most of it.
    hidden = torch.tensor([[6.0, 0.0]], dtype=torch.bfloat16).requires_grad_()
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16)
    head.target_logprobs(hidden, weight, torch.tensor([0])).backward()  # type: ignore[no-untyped-call]
    p = torch.sigmoid(torch.tensor(-6.0))
    torch.testing.assert_close(hidden.grad, torch.tensor([[p, -p]], dtype=torch.bfloat16), rtol=0.02, atol=0)


def hidden_and_weight(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN) * scale, torch.randn(VOCABULARY, HIDDEN)
    return hidden, weight, torch.randint(0, VOCABULARY, (ROWS,))


@pytest.mark.parametrize("slice_elements", [ROWS * 256, 1 << 21])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 5.0])
@SHAPES
def test_entropies_are_those_of_the_whole_softmax(
    monkeypatch: pytest.MonkeyPatch, slice_elements: int, scale: float, cap: float, temperature: float
) -> None:
    monkeypatch.setattr(head, "SLICE_ELEMENTS", slice_elements)
    hidden, weight, targets = hidden_and_weight(scale)
    logprobs, entropies = head.logprobs_and_entropies(hidden, weight, targets, cap=cap, temperature=temperature)
    expected = plain_softmax(hidden.double(), weight.double(), cap, temperature)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(1).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(logprobs, head.target_logprobs(hidden, weight, targets, cap=cap, temperature=temperature))
    assert entropies.dtype == torch.float32


@pytest.mark.usefixtures("many_slices")
def test_entropies_need_no_more_than_a_slice_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, logits = [], head._logits

    def noted(*args: float) -> torch.Tensor:
        sizes.append((made := logits(*args)).numel())  # type: ignore[arg-type]
        return made

    monkeypatch.setattr(head, "_logits", noted)
    head.logprobs_and_entropies(*hidden_and_weight())
    assert max(sizes) <= head.SLICE_ELEMENTS
    assert sum(sizes) == ROWS * VOCABULARY  # one pass


@pytest.mark.usefixtures("many_slices")
def test_the_entropy_of_a_certain_row_is_zero_and_that_of_an_even_one_is_log_v() -> None:
    weight, targets = torch.eye(VOCABULARY, HIDDEN), torch.zeros(2, dtype=torch.long)
    hidden = torch.zeros(2, HIDDEN)
    hidden[0, 3] = 1e4
    _, entropies = head.logprobs_and_entropies(hidden, weight, targets)
    torch.testing.assert_close(entropies, torch.tensor([0.0, VOCABULARY]).clamp_min(1).log())
    assert float(entropies[0]) >= 0


def test_bfloat16_entropies_are_those_of_the_rounded_logits() -> None:
    hidden, weight, targets = (t.bfloat16() if t.is_floating_point() else t for t in hidden_and_weight())
    _, entropies = head.logprobs_and_entropies(hidden, weight, targets)
    expected = torch.log_softmax((hidden @ weight.t()).double(), 1)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(1).float(), rtol=1e-4, atol=1e-4)
