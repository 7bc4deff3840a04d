"""What ``adapt_rotary`` does with a model, or with all of them.

python -m lrpe_md.integrations --table                    every rotary model of the libraries that are installed
python -m lrpe_md.integrations Qwen/Qwen3-0.6B            a configuration of transformers or diffusers: the name of one
python -m lrpe_md.integrations path/to/config.json        on the hub, a file, or a folder with one
python -m lrpe_md.integrations vit_small_patch16_dinov3   a model of timm
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .exchange import adapt_rotary
from .trial import LIBRARIES, try_library, write


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m lrpe_md.integrations", description=__doc__, formatter_class=_Raw)
    parser.add_argument("model", nargs="?", help="a configuration, or the name of a model of timm")
    parser.add_argument("--table", action="store_true", help="try every rotary model that is installed; CSV on stdout")
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="with --table: of these alone")
    given = parser.parse_args(arguments)
    if given.table == (given.model is not None):
        parser.error("expected a model or --table")
    if given.table:
        rows = write(row for library in given.library or LIBRARIES for row in try_library(library))
        return int(any(row.outcome == "wrong" for row in rows))
    try:
        model = make(given.model)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{given.model}: {error}", file=sys.stderr)
        return 2
    try:
        adapt_rotary(model, verbose=True)
    except (TypeError, ValueError) as error:
        print(f"refused: {error}")
        return 1
    return 0


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def make(name: str) -> nn.Module:
    """A model without weights, of a configuration or of timm.

    Raises:
        ValueError, OSError: there is none of this name.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    config: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    if config is not None and "_class_name" in config:
        return _of_diffusers(config)
    if config is None and "/" not in name:
        return _of_timm(name)
    return _of_transformers(str(path.parent) if config is not None else name)


def _of_timm(name: str) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise ValueError("expected a configuration, or a model of timm.list_models()")
    with torch.device("meta"):
        return timm.create_model(name)


def _of_diffusers(config: dict[str, Any]) -> nn.Module:
    import diffusers

    cls = getattr(diffusers, config["_class_name"], None)
    if cls is None:
        raise ValueError(f"expected a class of diffusers, got {config['_class_name']!r}")
    with _without_weights():
        return cls.from_config(config)


def _of_transformers(place: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(place)
    with _without_weights():
        return AutoModel.from_config(config)


def _without_weights() -> Any:
    """Buffers are real: it is frequencies that are read."""
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=False)


if __name__ == "__main__":
    sys.exit(main())
