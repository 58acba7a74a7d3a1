"""A transformers model that computes the logprobs of packed data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from opentinker.client.messages import Datum, IntArray, TokenChunk
from opentinker.errors import ConfigError, InvalidRequestError, UnknownModelError
from opentinker.server.trainer.attention import PACKED_ATTENTION, PackLayout
from opentinker.server.trainer.head import logprobs_and_entropies, target_logprobs
from opentinker.server.trainer.packing import Pack, pack_data


class PackedModel:
    """The frozen model of a directory; whoever trains parameters of it turns their gradients on.

    Raises:
        UnknownModelError: the directory holds no causal language model.
        ConfigError: packing does not reproduce this architecture's own forward pass.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=dtype, attn_implementation=PACKED_ATTENTION, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise UnknownModelError(f"cannot load a causal language model from {model_dir}: {error}") from error
        self.model.to(device).eval().requires_grad_(False)
        self.device, self.dtype = device, dtype
        self.config = self.model.config
        self.vocabulary = int(self.config.vocab_size)
        self.names: dict[str, nn.Parameter] = dict(self.model.named_parameters(remove_duplicate=False))
        """Every Hugging Face parameter name, tied ones too. LoRA layers keep these parameters but not their names."""
        self._untied = {name for name, _ in self.model.named_parameters()}
        self._head = self.model.get_output_embeddings().weight
        self.head_name = next(name for name, p in self.trainable().items() if p is self._head)
        # A gradient for the few rows of a pack instead of a dense one for the whole vocabulary.
        self.model.get_input_embeddings().sparse = True
        self._soft_cap = float(getattr(self.config, "final_logit_softcapping", None) or 0.0)
        self._prove()

    def trainable(self) -> dict[str, nn.Parameter]:
        """All parameters under their names, tied ones once."""
        return {name: p for name, p in self.names.items() if name in self._untied}

    def check_tokens(self, data: Sequence[Datum]) -> None:
        """Do the tokens exist and the data fit the model?

        Raises:
            InvalidRequestError: names the datum.
        """
        longest = getattr(self.config, "max_position_embeddings", None)
        for index, datum in enumerate(data):
            for name, tokens in (("tokens", datum.tokens), ("targets", datum.targets)):
                if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary:
                    raise InvalidRequestError(f"datum {index}: {name} are outside the vocabulary of {self.vocabulary} tokens")
            if longest is not None and len(datum) > longest:
                raise InvalidRequestError(f"datum {index} has {len(datum)} tokens, the model takes {longest}")

    def logprobs(
        self, pack: Pack, targets_N: IntArray, temperature: float, head_grad_VH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logprob of each weighted target of the pack, float32[N], differentiable in what is trainable.

        The output head's own gradient goes to `head_grad_VH` only (float32).
        """
        return target_logprobs(
            self._hidden(pack),
            self._head,
            self._tensor(targets_N),
            head_grad_VH,
            cap=self._soft_cap,
            temperature=temperature,
        )

    def logprobs_and_entropies(
        self, pack: Pack, targets_N: IntArray, temperature: float, head_grad_VH: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`logprobs`, entropy in nats of the distribution at each weighted target), float32[N] each."""
        return logprobs_and_entropies(
            self._hidden(pack), self._head, self._tensor(targets_N), head_grad_VH, cap=self._soft_cap, temperature=temperature
        )

    def _hidden(self, pack: Pack) -> torch.Tensor:
        """The last hidden state of the row that predicts each weighted target, [N, H]."""
        hidden_TH: torch.Tensor = self.model.base_model(
            input_ids=self._tensor(pack.tokens_T)[None],
            position_ids=self._tensor(pack.positions_T)[None],
            use_cache=False,
            packed=PackLayout(pack, self.dtype, self.device),
        ).last_hidden_state[0]
        return hidden_TH[self._tensor(pack.rows_N)]

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    @torch.no_grad()
    def _prove(self) -> None:
        """Compare two packed sequences that share a prompt with the model's own forward pass.

        This finds architectures that mix tokens other than by attention, or shape their logits in ways unknown here.
        """
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, self.vocabulary, 5)
        sequences = [np.concatenate([prompt, rng.integers(0, self.vocabulary, 4)]).astype(np.int32) for _ in range(2)]
        weights = np.repeat(np.array([0, 1], np.float32), 4)
        data = [Datum((TokenChunk(s[:-1]),), s[1:], {"weights": weights}) for s in sequences]
        (pack,) = pack_data(data, 64)
        targets = np.array([data[d].targets[t] for d, t in zip(pack.data_N, pack.steps_N, strict=True)], np.int32)
        packed = self.logprobs(pack, targets, 1.0).cpu().numpy()
        self.model.set_attn_implementation("eager")
        plain = torch.log_softmax(self.model(self._tensor(np.stack(sequences))).logits.float(), -1).cpu().numpy()
        self.model.set_attn_implementation(PACKED_ATTENTION)
        expected = plain[pack.data_N, pack.steps_N, targets]
        error = float(np.abs(packed - expected).mean())
        if not error < (1e-3 if self.dtype == torch.float32 else 0.25):
            raise ConfigError(
                f"the trainer cannot pack {self.config.model_type} models: logprobs differ by {error:.3g} on average",
                hint="the trainer supports decoders that mix tokens by softmax attention only",
            )
