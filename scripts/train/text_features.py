"""Compute features of captions once with T5, CLIP or another text model from transformers.

lrpe-md train features --encoder google/t5-v1_1-base --data emoji64.zip --out features
lrpe-md train diffusion --data emoji64.zip --text-features features --out runs/emoji
"""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.lib.format import open_memmap
from rich.console import Console
from rich.progress import track

from lrpe_md.checks import plural

from ...models.text import PretrainedEncoder, Text
from ..common.devices import choose_device
from ..common.folder import new_folder
from ..common.options import choose
from .checkpoint import digest_of, first_sentence
from .conditions import FEATURES, FORMAT
from .data.footage import find_films, is_footage
from .data.pictures import open_pictures
from .data.records import Records, Split
from .data.values import LATENTS, read_records

DTYPES = {"float16": np.float16, "float32": np.float32}


def load_encoder(name: str, length: int, device: torch.device) -> PretrainedEncoder:
    """Load a transformers text model and its tokenizer from a folder or a Hub ID.

    If the weights of the pooler are missing, there are no pooled features.

    Raises:
        typer.BadParameter: if there is no such model, other weights are missing, or the tokenizer can't pad captions or
            encode the empty caption.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

    # An import statement would make type checkers read all models of the library, which is slow.
    transformers: Any = import_module("transformers")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(name)
        if config.model_type in ("clip", "clip_text_model"):
            kind: Any = transformers.CLIPTextModel
        elif config.model_type in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES:
            kind = transformers.AutoModelForTextEncoding
        else:
            kind = transformers.AutoModel
        model, loading = kind.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, padding_side="right")
    except Exception as error:  # hub, JSON, safetensors and tokenizers raise various errors
        raise typer.BadParameter(
            f"--encoder {name}: expected a transformers text model with its tokenizer (a folder or a Hub ID), but "
            f"none was found ({first_sentence(error)}); pass another folder or Hub ID"
        ) from error
    missing = sorted(loading["missing_keys"])  # transformers initialises these weights randomly
    if others := [weight for weight in missing if not weight.startswith("pooler.")]:
        raise typer.BadParameter(
            f"--encoder {name}: expected all weights of {type(model).__name__}, got none for {others[0]}"
            f"{f' and {len(others) - 1} others' if len(others) > 1 else ''}; pass a complete model"
        )
    if missing:
        model.pooler = None
    try:
        return PretrainedEncoder(model.to(device), tokenizer, length)
    except ValueError as error:
        raise typer.BadParameter(
            f"--encoder {name}: can't encode the empty caption ({first_sentence(error)}); pass another model"
        ) from error


def is_same_encoder(encoder: PretrainedEncoder, empty: Text) -> bool:
    """Return whether ``empty`` contains the encoder's features of the empty caption, up to rounding to float16."""
    found = encoder(encoder.empty(1))
    for own, stored in ((found.features, empty.features), (found.pooled, empty.pooled)):
        if own is None or stored is None:
            if own is not stored:
                return False
        elif own.shape != stored.shape or (own - stored).norm() > 0.05 * stored.norm():
            return False
    return True


def count_tokens(model: PretrainedEncoder, captions: list[str]) -> list[int]:
    """Return the number of tokens in each caption, or the maximum plus 1 if the model truncates the caption."""
    tokens = model.tokenizer(captions, truncation=True, max_length=model.max_length + 1)["input_ids"]
    return [len(ids) for ids in tokens]


def records_of(path: Path, split: Split, without: str = "") -> Records:
    """Return the records of images, videos or latents without decoding any of them."""
    if (path / LATENTS).is_file():
        return read_records(path)
    if is_footage(path):
        return find_films(path, split, "captions")[1]
    return open_pictures(path, split, condition="captions", without=without).records


def main(
    data: Annotated[Path, typer.Option(help="Images or videos with captions, or their latents.")],
    out: Annotated[Path, typer.Option(help="New folder for the features.")],
    encoder: Annotated[str, typer.Option(help="Transformers text model with its tokenizer: a folder or a Hub ID.")],
    without: Annotated[
        str, typer.Option(help="Boolean field of the caption table; rows where it is true are left out.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Number of images or videos to use; 0 uses all.")] = 0,
    max_length: Annotated[int, typer.Option(min=1, help="Maximum length of a caption, in tokens.")] = 77,
    batch: Annotated[int, typer.Option(min=1, help="Number of captions to encode at a time.")] = 32,
    dtype: Annotated[str, typer.Option(help="Precision of the stored features: float16 or float32.")] = "float16",
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, or auto (cuda if available).")] = "auto",
) -> None:
    """Compute text features of captions for `train diffusion --text-features`.

    Each caption is encoded once, and so is the empty caption, which guidance needs.
    """
    choose("--dtype", [dtype], DTYPES)
    on = choose_device(device)
    records = records_of(data, Split(1, limit=limit or None), without)
    if records.captions is None:
        raise typer.BadParameter(f"--data {data}: expected samples with captions, got none")
    captions = list(dict.fromkeys(["", *records.captions]))
    model = load_encoder(encoder, max_length, on)
    with new_folder(out) as part:
        about = write_features(part, model, captions, batch, DTYPES[dtype])
        about |= {"format": FORMAT, "encoder": encoder, "weights": digest_of(model.model.state_dict())}
        (part / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
        (part / FEATURES).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    Console(stderr=True).print(
        f"{out}: features of {plural(len(captions), 'caption')}, {about['length']} × {about['width']}"
    )


def write_features(
    folder: Path, model: PretrainedEncoder, captions: list[str], batch: int, dtype: Any
) -> dict[str, Any]:
    """Write features.npy (N, L, C), mask.npy (N, L) and, if the model has pooled features, pooled.npy (N, P).

    L is the length of the longest caption, and features of padding are 0. The first row belongs to the empty caption.
    """
    parts = [captions[i : i + batch] for i in range(0, len(captions), batch)]
    lengths, arrays = [length for part in parts for length in count_tokens(model, part)], {}
    length = min(max(lengths), model.max_length)
    cut = sum(each > model.max_length for each in lengths)
    if cut:
        typer.echo(
            f"{cut} of {len(captions)} captions are truncated to {model.max_length} tokens; pass a larger --max-length "
            "to keep them whole, if the text model supports it",
            err=True,
        )
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "features": ((len(captions), length, model.width), dtype), "mask": ((len(captions), length), np.bool_),
    }  # fmt: skip
    if model.pooled_width:
        shapes["pooled"] = ((len(captions), model.pooled_width), dtype)
    for name, (shape, kind) in shapes.items():
        arrays[name] = open_memmap(folder / f"{name}.npy", mode="w+", dtype=kind, shape=shape)
    digest = hashlib.sha256(repr(captions).encode())
    for i, part in enumerate(track(parts, "encoding captions", console=Console(stderr=True))):
        rows = slice(i * batch, i * batch + len(part))
        text = model(part)
        assert text.features is not None
        assert text.mask is not None
        arrays["features"][rows, : text.features.shape[1]] = (text.features * text.mask[..., None]).cpu().numpy()
        arrays["mask"][rows, : text.mask.shape[1]] = text.mask.cpu().numpy()
        if text.pooled is not None:
            arrays["pooled"][rows] = text.pooled.cpu().numpy()
        for array in arrays.values():
            if not np.isfinite(array[rows]).all():
                raise typer.BadParameter("--dtype float16: features exceed its range; use float32")
            digest.update(np.ascontiguousarray(array[rows]).tobytes())
    for array in arrays.values():
        array.flush()
    return {
        "length": length, "width": model.width, "pooled_width": model.pooled_width,
        "empty_length": int(arrays["mask"][0].sum()), "digest": digest.hexdigest(),
    }  # fmt: skip
