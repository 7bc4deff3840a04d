"""Decode prompts of different lengths in one batch, with a transformers language model and the fused rotation.

    python docs/examples/decode_lm.py --model Qwen/Qwen3-0.6B --prompt "The sea is" --prompt "Once upon a time"

`adapt_rotary` rotates q and k in one launch, with the model's own positions and length scaling. transformers still
handles weights, cache and left padding. Without --model, the script uses a small random Llama with byte tokens.
On a CPU, `adapt_rotary` uses the reference implementation, which can be slower than transformers' own rotation.
"""

import argparse
import time

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

from lrpe_md import adapt_rotary
from lrpe_md.integrations import restore_rotary


class Bytes:
    """A byte tokenizer: token 0 is padding, and byte b is token 1 + b."""

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        rows = [[1 + byte for byte in prompt.encode()] for prompt in prompts]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def batch_decode(self, tokens: Tensor) -> list[str]:
        return [bytes(i - 1 for i in row if i > 0).decode(errors="replace") for row in tokens.tolist()]


class Words:
    """A Hub tokenizer with left padding."""

    def __init__(self, name: str) -> None:
        self.inner = AutoTokenizer.from_pretrained(name, padding_side="left")
        self.inner.pad_token = self.inner.pad_token or self.inner.eos_token

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        return dict(self.inner(prompts, return_tensors="pt", padding=True))

    def batch_decode(self, tokens: Tensor) -> list[str]:
        return self.inner.batch_decode(tokens, skip_special_tokens=True)


def random_llama() -> LlamaForCausalLM:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rope_parameters=rope, pad_token_id=0, eos_token_id=None,
    ))  # fmt: skip


def main(argv: list[str] | None = None) -> tuple[Tensor, Tensor]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Model name on the Hub, or a folder")
    parser.add_argument("--prompt", action="append")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(argv)
    set_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else random_llama()
    tokenizer, model = Words(args.model) if args.model else Bytes(), model.eval().to(device)
    inputs = {name: t.to(device) for name, t in tokenizer(args.prompt or ["The sea is", "Once upon a time"]).items()}
    found = {}
    for name, change in (("transformers", restore_rotary), ("lrpe-md", adapt_rotary)):
        change(model)
        since = time.perf_counter()
        found[name] = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
        print(f"{name}: {found[name].numel() / (time.perf_counter() - since):.0f} tokens per second, prompts included")
    for text in tokenizer.batch_decode(found["lrpe-md"]):
        print(repr(text))
    return found["transformers"], found["lrpe-md"]


if __name__ == "__main__":
    main()
