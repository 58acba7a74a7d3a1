"""A transformers model that computes the logprobs of packed data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig

from opentinker.client.messages import Chunk, Datum, ImageChunk, IntArray, TokenChunk, chunk_tokens
from opentinker.errors import ConfigError, InvalidRequestError, UnknownModelError
from opentinker.server.images import ImageStore, sample_picture
from opentinker.server.trainer.attention import PACKED_ATTENTION, PackLayout
from opentinker.server.trainer.head import logprobs_and_entropies, target_logprobs
from opentinker.server.trainer.packing import Pack, pack_data
from opentinker.server.trainer.scalar_head import ScalarHead
from opentinker.server.vision import attention, auto_class, embed, image_features


class PackedModel:
    """The frozen model of a directory; whoever trains parameters of it turns their gradients on. `images` are those that its
    data may name, for a model with a vision tower.

    Raises:
        UnknownModelError: the directory holds no causal language model.
        ConfigError: packing does not reproduce this architecture's own forward pass, or its image processor does not belong to
            its vision tower; or `flex` (FlexAttention) where it cannot be.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        images: ImageStore | None = None,
        *,
        flex: bool = False,
    ) -> None:
        if flex and device.type != "cuda":
            raise ConfigError(
                f"FlexAttention has no backward pass on {device.type}", hint="set trainer.attention to 'auto' or 'sdpa'"
            )
        try:
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
            self.model: Any = auto_class(config).from_pretrained(
                model_dir, dtype=dtype, attn_implementation=attention(config, PACKED_ATTENTION), local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise UnknownModelError(f"cannot load a causal language model from {model_dir}: {error}") from error
        self.model.to(device).eval().requires_grad_(False)
        self.device, self.dtype = device, dtype
        self.flex = flex
        self.config = self.model.config
        self.images = images
        text = self.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.longest: int | None = getattr(text, "max_position_embeddings", None)
        self.names: dict[str, nn.Parameter] = dict(self.model.named_parameters(remove_duplicate=False))
        """Every Hugging Face parameter name, tied ones too. LoRA layers keep these parameters but not their names."""
        self._untied = {name for name, _ in self.model.named_parameters()}
        self._head = self.model.get_output_embeddings().weight
        self.hidden_size = int(self._head.shape[1])
        self.head_name = next(name for name, p in self.trainable().items() if p is self._head)
        # A gradient for the few rows of a pack instead of a dense one for the whole vocabulary.
        self.model.get_input_embeddings().sparse = True
        self._soft_cap = float(getattr(text, "final_logit_softcapping", None) or 0.0)
        self._prove()

    def trainable(self) -> dict[str, nn.Parameter]:
        """All parameters under their names, tied ones once."""
        return {name: p for name, p in self.names.items() if name in self._untied}

    def trunk(self) -> dict[str, nn.Parameter]:
        """What is `trainable` below another head than the output head: all but that, unless it is tied to the embeddings."""
        if self._head is self.model.get_input_embeddings().weight:
            return self.trainable()
        return {name: p for name, p in self.trainable().items() if name != self.head_name}

    def check_tokens(self, data: Sequence[Datum]) -> None:
        """Do the tokens exist and the data fit the model?

        Raises:
            InvalidRequestError: names the datum.
        """
        longest = self.longest
        for index, datum in enumerate(data):
            for name, tokens in (("tokens", datum.tokens), ("targets", datum.targets)):
                if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary:
                    raise InvalidRequestError(
                        f"datum {index}: {name} are outside the vocabulary of {self.vocabulary} tokens",
                        hint="take the tokenizer of this server's model: GET /v1/tokenizer",
                    )
            if longest is not None and len(datum) > longest:
                raise InvalidRequestError(
                    f"datum {index} has {len(datum)} tokens, the model takes {longest}", hint="shorten it, or leave it out"
                )

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

    def scalars(self, pack: Pack, head: ScalarHead) -> torch.Tensor:
        """What the head makes of the row that predicts each weighted target, float32[N]; differentiable as `logprobs` is."""
        return head(self._hidden(pack))

    def _hidden(self, pack: Pack) -> torch.Tensor:
        """The last hidden state of the row that predicts each weighted target, [N, H]."""
        tokens_T = self._tensor(pack.tokens_T)
        inputs = {"inputs_embeds": self._embedded(tokens_T, pack)[None]} if pack.images else {"input_ids": tokens_T[None]}
        hidden_TH: torch.Tensor = self.model.base_model(
            **inputs,
            position_ids=self._tensor(pack.positions_T)[None],
            use_cache=False,
            packed=PackLayout(pack, self.dtype, self.device, flex=self.flex),
        ).last_hidden_state[0]
        return hidden_TH[self._tensor(pack.rows_N)]

    def _embedded(self, tokens_T: torch.Tensor, pack: Pack) -> torch.Tensor:
        """The pack's embeddings with its images' features, [T, H]; an image that is there several times is computed once."""
        assert self.images is not None, "only a store can have resolved the images of a pack"
        features = image_features(self.model, self.images, (image for _, image in pack.images))
        return embed(self.model.get_input_embeddings(), tokens_T, pack.images, features, self.images.processor.token_id)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    @torch.no_grad()
    def _prove(self) -> None:
        """Compare two packed sequences that share a prompt with the model's own forward pass; where it takes images, with one
        in the prompt and one in each branch.

        This finds architectures that mix tokens other than by attention, count positions other than one by one, or shape their
        logits in ways unknown here, and processors that do not belong to the model.
        """
        rng = np.random.default_rng(0)
        pictures = [] if self.images is None else [sample_picture(seed) for seed in range(3)]
        uploaded = {} if self.images is None else self.images.add(pictures)
        shown = [ImageChunk(sha256, tokens) for sha256, tokens in uploaded.items()]
        prompt: list[Chunk] = [self._random(rng, 5), *shown[:1], self._random(rng, 2)]
        branches: list[list[Chunk]] = [[self._random(rng, 2), *shown[1 + i : 2 + i], self._random(rng, 2)] for i in range(2)]
        data = [_scored(prompt, branch) for branch in branches]
        (pack,) = pack_data(data, 1 << 20)
        targets = np.array([data[d].targets[t] for d, t in zip(pack.data_N, pack.steps_N, strict=True)], np.int32)
        packed = self.logprobs(pack, targets, 1.0).cpu().numpy()
        self.model.set_attn_implementation(attention(self.config, "eager"))
        plain = [self._plain(d, pictures[:1] + pictures[1 + i : 2 + i]) for i, d in enumerate(data)]
        self.model.set_attn_implementation(attention(self.config, PACKED_ATTENTION))
        expected = np.array([plain[d][t, target] for d, t, target in zip(pack.data_N, pack.steps_N, targets, strict=True)])
        error = float(np.abs(packed - expected).mean())
        if not error < (1e-3 if self.dtype == torch.float32 else 0.25):
            raise ConfigError(
                f"the trainer cannot pack {self.config.model_type} models: logprobs differ by {error:.3g} on average",
                hint="the trainer supports decoders with causal softmax attention, at positions that are counted one by one",
            )

    def random_tokens(self, rng: np.random.Generator, count: int) -> IntArray:
        """Any tokens but an image's."""
        tokens = rng.integers(0, self.vocabulary, count).astype(np.int32)
        if self.images is not None:
            tokens[tokens == self.images.processor.token_id] = 0
        return tokens

    def _random(self, rng: np.random.Generator, count: int) -> TokenChunk:
        return TokenChunk(self.random_tokens(rng, count))

    def _plain(self, datum: Datum, pictures: Sequence[bytes]) -> np.ndarray[Any, Any]:
        """Log-probabilities of everything at every position by the model's own forward pass, [T, V]."""
        assert not pictures or self.images is not None
        pixels = self.images.processor(pictures).pixels if self.images is not None and pictures else {}
        pixels = {key: value.to(self.device) for key, value in pixels.items()}
        logits_TV = self.model(input_ids=self._tensor(datum.tokens)[None], **pixels).logits[0]
        return torch.log_softmax(logits_TV.float(), -1).cpu().numpy()


def _scored(prompt: Sequence[Chunk], branch: Sequence[Chunk]) -> Datum:
    """A datum in which every token of the branch is weighted that is not an image's."""
    chunks = (*prompt, *branch)
    weights = [np.zeros(len(chunk.tokens), np.float32) for chunk in prompt]
    weights += [np.full(len(chunk.tokens), isinstance(chunk, TokenChunk), np.float32) for chunk in branch]
    inputs = (*chunks[:-1], TokenChunk(chunks[-1].tokens[:-1]))
    return Datum(inputs, chunk_tokens(chunks)[1:], {"weights": np.concatenate(weights)[1:]})
