"""Decoding with :class:`lrpe_md.models.lm.CausalLm`: a step at a time, as a CUDA graph on a GPU, and sampling.

Shapes: B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpe_md.checks import check_at_least

from .lm import CausalLm, check_room, check_tokens

__all__ = ["Decoder", "generate", "left_pad", "sample"]


@torch.no_grad()
def generate(
    model: CausalLm,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    padding: Tensor | None = None,
    cuda_graph: bool | None = None,
) -> Tensor:
    """Continue each prompt: (B, N) → (B, N + max_new_tokens).

    Args:
        prompt: tokens, at least one; of unequal lengths by :func:`left_pad`.
        temperature, top_p, generator: see :func:`sample`.
        padding: (B,), how many of each prompt's first tokens are padding: 0 to its length, which is not checked, since
            that would wait for the GPU.
        cuda_graph: replay decode steps as a CUDA graph; None: on a GPU.

    Raises:
        ValueError: an argument that does not fit.
    """
    check_tokens("prompt", prompt)
    check_at_least(0, max_new_tokens=max_new_tokens)
    check_sampling(temperature, top_p)
    if max_new_tokens == 0:
        return prompt.clone()
    decoder = Decoder(model, len(prompt), prompt.shape[1] + max_new_tokens, padding=padding, cuda_graph=cuda_graph)
    logits = decoder.prefill(prompt)
    tokens = [sample(logits, temperature, top_p, generator)]
    for _ in range(max_new_tokens - 1):
        tokens.append(sample(decoder.step(tokens[-1]), temperature, top_p, generator))
    return torch.cat([prompt, torch.stack(tokens, dim=1)], dim=1)


class Decoder:
    """A model with a cache: :meth:`prefill` a batch of prompts, then :meth:`step` by step, without a synchronisation.

    Args:
        batch, max_length, padding: as for :meth:`CausalLm.new_cache`.
        cuda_graph: capture a step, and replay it; None: on a GPU. It stays valid after ``model.rescale`` and after
            training goes on, which change tensors in place.
    """

    def __init__(
        self,
        model: CausalLm,
        batch: int,
        max_length: int,
        *,
        padding: Tensor | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        self.model, self.device = model, model.embed.weight.device
        self.cache = model.new_cache(batch, max_length, padding)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.length = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        if cuda_graph and self.device.type != "cuda":
            raise ValueError(f"cuda_graph: expected a model on a GPU, got one on {self.device}; use None or False")
        if self.device.type == "cuda" and cuda_graph is not False:
            self._capture()

    @torch.no_grad()
    def prefill(self, prompt: Tensor) -> Tensor:
        """Start again with these tokens (B, N): logits (B, vocab_size) of the next.

        Raises:
            ValueError: no tokens, of another number of samples, or of another dtype than integers.
            IndexError: more than a cache with softmax attention has room for.
        """
        check_tokens("prompt", prompt, len(self.token))
        self._take_room(0, prompt.shape[1])
        self.cache.reset()
        return self.model(prompt, self.cache)[:, -1]

    @torch.no_grad()
    def step(self, token: Tensor) -> Tensor:
        """One more token each, (B,): logits (B, vocab_size) of the next; a graph's are overwritten by the next step.

        Raises:
            ValueError: tokens of another shape or dtype.
            IndexError: no room for it in a cache with softmax attention.
        """
        if tuple(token.shape) != (len(self.token),) or token.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"token: expected integers ({len(self.token)},), got {token.dtype} {tuple(token.shape)}")
        self._take_room(self.length, 1)
        self.token.copy_(token[:, None])
        if self.graph is None:
            return self._step()
        self.graph.replay()
        return self.logits

    def _take_room(self, length: int, number: int) -> None:
        """Count on the host what the cache holds, so that nothing waits for the device."""
        if "softmax" in self.model.config.kinds:
            check_room(length, number, self.cache.max_length)
        self.length = length + number

    def _step(self) -> Tensor:
        return self.model(self.token, self.cache)[:, -1]

    @torch.no_grad()
    def _capture(self) -> None:
        kind, enabled = self.device.type, torch.is_autocast_enabled("cuda")
        # Weights that autocast has cast and keeps would be gone when the graph replays.
        with torch.cuda.device(self.device), torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=enabled, cache_enabled=False
        ):  # fmt: skip
            here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for _ in range(2):
                    self._step()
                    self.cache.reset()
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = self._step()
        self.graph = graph
        self.cache.reset()


def check_sampling(temperature: float, top_p: float) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected 0 (the most likely token) or more, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected more than 0 and at most 1, got {top_p}")


def sample(
    logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draw from softmax(logits / temperature): (.., vocab_size) → (..), without a synchronisation.

    Args:
        temperature: 0 takes the likeliest token.
        top_p: keep the likeliest tokens that together reach this probability (arXiv 1904.09751).
        generator: on the device of the logits.
    """
    check_sampling(temperature, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, index = probabilities.sort(dim=-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        probabilities = torch.zeros_like(ordered).scatter(-1, index, ordered)
    # The largest of p / e with exponential e is a draw from p; torch.multinomial reads its input on the host.
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)


def left_pad(prompts: Sequence[Tensor], value: int = 0) -> tuple[Tensor, Tensor]:
    """Return prompts (N_i,) as a left-padded batch (B, N), and the padding before each, (B,)."""
    if not prompts or any(p.ndim != 1 or not len(p) for p in prompts):
        raise ValueError(
            f"prompts: expected at least one prompt (N,) with N > 0, got {[tuple(p.shape) for p in prompts]}"
        )
    longest = max(len(p) for p in prompts)
    padding = [longest - len(p) for p in prompts]
    tokens = torch.stack([F.pad(p, (n, 0), value=value) for p, n in zip(prompts, padding, strict=True)])
    return tokens, torch.tensor(padding, device=tokens.device)
