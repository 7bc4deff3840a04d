"""Decoding and sampling with :class:`lrpe_md.models.lm.CausalLm`. On a GPU, each decoding step runs as a CUDA graph.

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
    """Generate tokens after each prompt, and return prompts and new tokens as (B, N + max_new_tokens).

    Args:
        prompt: tokens (B, N) with N > 0. Use :func:`left_pad` for prompts with different lengths.
        temperature, top_p, generator: see :func:`sample`.
        padding: number of padding tokens (B,) at the start of each prompt, from 0 to N. With a model on a GPU, the
            values are not checked, because that would force a synchronisation.
        cuda_graph: whether to replay decoding steps as a CUDA graph. None uses a graph only on a GPU.

    Raises:
        TypeError, ValueError: for an invalid argument.
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
    """Decoder with a static cache. Call :meth:`prefill` with prompts, and then :meth:`step` for each new token.

    Args:
        batch, max_length, padding: size of the cache; see :meth:`CausalLm.new_cache`.
        cuda_graph: whether to capture a step as a CUDA graph and replay it. None uses a graph only on a GPU. The graph
            stays valid after ``model.rescale`` and further training, because both change tensors in place.
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
        """Clear the cache, process the prompts (B, N), and return the logits (B, vocab_size) of the next token.

        Raises:
            ValueError: if there are no tokens, the batch size differs, or the dtype is not an integer. On a CPU, this
                error is also raised if tokens are not in the vocabulary, or if the padding is longer than the prompts.
            IndexError: if a cache with softmax attention has no room for the tokens.
        """
        check_tokens("prompt", prompt, len(self.token))
        self._check_values(prompt)
        self._take_room(0, prompt.shape[1])
        self.cache.reset()
        return self.model(prompt, self.cache)[:, -1]

    @torch.no_grad()
    def step(self, token: Tensor) -> Tensor:
        """Process one more token (B,) per sample, and return the logits (B, vocab_size) of the next token.

        With a CUDA graph, the next step overwrites these logits.

        Raises:
            ValueError: if tokens have the wrong shape or dtype.
            IndexError: if a cache with softmax attention is full.
        """
        if tuple(token.shape) != (len(self.token),) or token.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"token: expected an integer tensor of shape ({len(self.token)},), got {token.dtype} "
                f"{tuple(token.shape)}"
            )
        self._take_room(self.length, 1)
        self.token.copy_(token[:, None])
        if self.graph is None:
            return self._step()
        self.graph.replay()
        return self.logits

    def _check_values(self, prompt: Tensor) -> None:
        """Check tokens and padding that are on the CPU. On a GPU, this check would force a synchronisation."""
        size = self.model.config.vocab_size
        if prompt.device.type == "cpu" and not 0 <= prompt.min() <= prompt.max() < size:
            least, most = prompt.min().item(), prompt.max().item()
            raise ValueError(
                f"prompt: expected tokens from 0 to {size - 1}, got values from {least} to {most}. To encode a "
                "string as bytes, pass torch.tensor([list(text.encode())])"
            )
        padding, length = self.cache.padding, prompt.shape[1]
        if padding.device.type == "cpu" and not 0 <= padding.min() <= padding.max() <= length:
            raise ValueError(
                f"padding: expected 0 to {length} tokens (the length of the prompts), got {padding.tolist()}; pass "
                "the result of left_pad"
            )

    def _take_room(self, length: int, number: int) -> None:
        """Check that the cache has room. The tokens are counted on the host to avoid a synchronisation."""
        if "softmax" in self.model.config.kinds:
            check_room(length, number, self.cache.max_length)
        self.length = length + number

    def _step(self) -> Tensor:
        return self.model(self.token, self.cache)[:, -1]

    @torch.no_grad()
    def _capture(self) -> None:
        kind, enabled = self.device.type, torch.is_autocast_enabled("cuda")
        # Autocast must not cache cast weights, because they would be freed before the graph is replayed.
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
        raise ValueError(f"temperature: expected a finite non-negative number, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number greater than 0 and at most 1, got {top_p}")


def sample(
    logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Sample tokens (...) from softmax(logits / temperature) without a synchronisation. Logits are (..., vocab_size).

    Args:
        temperature: number to divide the logits by. With 0, the most likely token is always chosen.
        top_p: sample only from the most likely tokens that together reach this probability (arXiv 1904.09751).
        generator: random number generator on the logits' device.
    """
    check_sampling(temperature, top_p)
    if temperature < 1e-30:  # logits divided by a smaller temperature could overflow in float32
        return logits.argmax(-1)
    probabilities = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, index = probabilities.sort(dim=-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        probabilities = torch.zeros_like(ordered).scatter(-1, index, ordered)
    # If e is exponentially distributed, argmax(p / e) is a sample from p. torch.multinomial would synchronise.
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)


def left_pad(prompts: Sequence[Tensor], value: int = 0) -> tuple[Tensor, Tensor]:
    """Pad prompts (N_i,) on the left. Return the batch (B, N) and the number of padding tokens (B,) of each prompt."""
    if not all(isinstance(p, Tensor) for p in prompts):
        raise TypeError(
            f"prompts: expected integer tensors of shape (N,), got {[type(p).__name__ for p in prompts]}. To encode a "
            "string as bytes, pass torch.tensor(list(text.encode()))"
        )
    if len(prompts) == 0 or any(p.ndim != 1 or not len(p) for p in prompts):
        raise ValueError(
            f"prompts: expected at least one prompt of shape (N,) with N > 0, got {[tuple(p.shape) for p in prompts]}"
        )
    longest = max(len(p) for p in prompts)
    padding = [longest - len(p) for p in prompts]
    tokens = torch.stack([F.pad(p, (n, 0), value=value) for p, n in zip(prompts, padding, strict=True)])
    return tokens, torch.tensor(padding, device=tokens.device)
