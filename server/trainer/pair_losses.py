"""The losses of preferences, as sums over pairs: data 2i and 2i + 1 are the chosen and the rejected answer to one prompt.

With d = sum over an answer's weighted tokens of w * (l - reference logprob), or, for `ipo`, their mean, and v the score of a
scalar head at its last weighted token; c, r = chosen, rejected:

- `dpo`: -(1 - e) log sigmoid(beta (d_c - d_r)) - e log sigmoid(-beta (d_c - d_r)), e = `label_smoothing` (Rafailov et al.,
  2023, eq. 7; e: Mitchell, 2023, "A note on DPO with noisy preferences").
- `ipo`: (d_c - d_r - 1 / (2 beta))^2 (Azar et al., 2024, eq. 17). The mean in place of the sum is not in the paper; its authors
  have confirmed it to TRL, and with sums longer answers would weigh more.
- `bradley_terry`: -log sigmoid(v_c - v_r - m) + k (v_c + v_r)^2 (Ouyang et al., 2022, eq. 1; the margin m, from `margins`:
  Touvron et al., 2023, eq. 2; k = `centring_coefficient`: Eisenstein et al., 2023).
"""

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import logsigmoid

from opentinker.client.messages import Datum, LossConfig
from opentinker.errors import InvalidRequestError
from opentinker.server.trainer.packing import same_prompt

_ORDER = "data come in pairs: the chosen answer, the rejected one, the next pair's chosen one, ..."


def check_pairs(data: Sequence[Datum], loss: LossConfig) -> None:
    """Raises: InvalidRequestError when the data are no pairs of answers to one prompt each."""
    if len(data) % 2:
        raise InvalidRequestError(f"the loss '{loss.name}' compares pairs, but there are {len(data)} data", hint=_ORDER)
    for index, datum in enumerate(data):
        if not datum.weights.any():
            raise InvalidRequestError(f"datum {index} has no weighted target: the loss '{loss.name}' compares two answers")
    for first in range(0, len(data), 2):
        if not same_prompt(data[first], data[first + 1]):
            raise InvalidRequestError(
                f"data {first} and {first + 1} are no pair: they differ before their first weighted target", hint=_ORDER
            )


def pair_loss(
    loss: LossConfig, outputs_N: torch.Tensor, arrays_N: Mapping[str, torch.Tensor], sequence_N: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """(sum of the loss over pairs, differentiable in `outputs_N`; its metrics). `outputs_N` are logprobs, or scores for
    `bradley_terry`. `sequence_N` (int64) says whose tokens they are, answer after answer: chosen, rejected, chosen, ...

    Metrics: `tokens`, `pairs`, `loss_sum`; of rewards, beta * d or v: `chosen_reward_sum`, `rejected_reward_sum`, `margin_sum`
    (their difference) and `correct_sum` (pairs whose chosen reward is larger; a tie is half a pair); of the losses with
    logprobs `chosen_logprob_sum` and `rejected_logprob_sum` (whole answers).
    """
    _, index_N = torch.unique_consecutive(sequence_N, return_inverse=True)
    metrics = {"tokens": float(len(outputs_N)), "pairs": float(index_N.max() + 1) / 2}
    if loss.name == "bradley_terry":
        last_S = torch.zeros(_count(index_N), dtype=torch.int64, device=outputs_N.device)
        last_S = last_S.scatter_reduce(0, index_N, torch.arange(len(index_N), device=outputs_N.device), "amax")
        chosen, rejected = _sides(outputs_N[last_S])
        margin = _sides(arrays_N["margins"][last_S])[0] if "margins" in arrays_N else 0.0
        loss_P = -logsigmoid(chosen - rejected - margin) + loss.centring_coefficient * (chosen + rejected).square()
        rewards = (chosen, rejected)
    else:
        weights_N = arrays_N["weights"]
        ratio_S = _sums(weights_N * (outputs_N - arrays_N["reference_logprobs"]), index_N)
        if loss.name == "ipo":
            ratio_S = ratio_S / _sums(weights_N, index_N)
        chosen, rejected = _sides(ratio_S)
        difference = chosen - rejected
        if loss.name == "ipo":
            loss_P = (difference - 1 / (2 * loss.beta)).square()
        else:
            smoothing, logit = loss.label_smoothing, loss.beta * difference
            loss_P = -(1 - smoothing) * logsigmoid(logit) - smoothing * logsigmoid(-logit)
        rewards = (loss.beta * chosen, loss.beta * rejected)
        said = _sides(_sums(weights_N * outputs_N.detach(), index_N))
        metrics |= {"chosen_logprob_sum": float(said[0].sum()), "rejected_logprob_sum": float(said[1].sum())}
    with torch.no_grad():
        margin_P = rewards[0] - rewards[1]
        metrics |= {
            "chosen_reward_sum": float(rewards[0].sum()),
            "rejected_reward_sum": float(rewards[1].sum()),
            "margin_sum": float(margin_P.sum()),
            "correct_sum": float((torch.sign(margin_P) + 1).sum()) / 2,
        }
    total = loss_P.sum()
    metrics["loss_sum"] = float(total.detach())
    return total, metrics


def _count(index_N: torch.Tensor) -> int:
    return int(index_N.max()) + 1


def _sums(values_N: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """By sequence."""
    return values_N.new_zeros(_count(index_N)).index_add(0, index_N, values_N)


def _sides(values_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(of the chosen, of the rejected) answers of pairs."""
    return values_S[0::2], values_S[1::2]
