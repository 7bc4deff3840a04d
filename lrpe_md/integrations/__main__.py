"""Print how ``adapt_rotary`` would change a model, without allocating its weights.

python -m lrpe_md.integrations Qwen/Qwen3-0.6B            a transformers or diffusers configuration: its name on the
python -m lrpe_md.integrations path/to/any_name.json      hub, a file, or a folder with a config.json
python -m lrpe_md.integrations vit_small_patch16_dinov3   a timm model
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .rotary import adapt_rotary

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit status: 1 if the model is not supported, 2 if it cannot be built."""
    parser = argparse.ArgumentParser(
        "python -m lrpe_md.integrations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="Configuration (a name, file or folder), or the name of a timm model.")
    name = parser.parse_args(arguments).model
    try:
        with torch.device("meta"):
            model = _make(name)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    try:
        adapt_rotary(model, verbose=True)
    except (TypeError, ValueError) as error:
        print(f"not supported: {error}")
        return 1
    return 0


def _make(name: str) -> nn.Module:
    """Build a model from a configuration or a timm name. Raise ValueError or OSError if there is no such model."""
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if path.suffix == ".json" and not path.is_file():
        raise ValueError("expected a configuration, got a path that does not exist")
    config = _read(path) if path.is_file() else None
    if config is None and "/" not in name:
        import timm

        if not timm.is_model(name):
            raise ValueError("expected a configuration, or a model from timm.list_models()")
        return timm.create_model(name)
    if config is not None and "_class_name" in config:
        import diffusers

        cls = getattr(diffusers, config["_class_name"], None)
        if cls is None:
            raise ValueError(f"expected a diffusers class, got {config['_class_name']!r}")
        return cls.from_config(config)
    # An import statement would make type checkers read all models of the library, which is slow.
    transformers: Any = import_module("transformers")
    return transformers.AutoModel.from_config(
        transformers.AutoConfig.from_pretrained(name if config is None else str(path))
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected a configuration (a JSON object), got a different kind of file ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"expected a configuration (a JSON object), got {type(config).__name__}")
    return config


if __name__ == "__main__":
    sys.exit(main())
