"""Load initial weights from a run, a timm checkpoint or a safetensors file, and export the weights of a run."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import typer
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import (  # pyright: ignore[reportPrivateImportUsage]
    adapt_input_conv,
    get_pretrained_cfg,
    is_model,
    load_state_dict,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from lrpe_md.integrations.timm import LrpeVisionTransformer, checkpoint_filter_fn
from lrpe_md.modules.base import FrequencyModule

from ...models.lm import CausalLm
from ...models.video import LrpeVideoTransformer, inflate_unchecked
from ...models.vit import rename_final_norm
from ..common.folder import save_whole
from .checkpoint import digest_of, first_sentence, read_checkpoint
from .data.buckets import show_size
from .encodings import find_reference, has_coordinates
from .loop import WHOLE, Trainer

EXPORT = "model.safetensors"
# Name prefixes that may exist only in the model, and prefixes that may exist only in the file.
NEW = ("head.", "fc_norm.", "encoding.", "pos_embed")
LEFT_OUT = (*NEW, "norm.", "cls_token", "reg_token", "pre_logits.")
# Norms after attention. `train` adds them to models with linear layers.
NORMS = (".attn.norm.", ".image.norm.", ".text.norm.")
PREFIX = ("cls_token", "reg_token")
# Features of the empty caption. They are part of the data, and are not trained.
EMPTY = "text_encoder.empty_"
SIZES = ("patch", "dim", "depth", "heads", "qk_norm")
FREE = ("encoding", "attention", "memory")  # model options that may differ, unless they change the weights' names
# Maps a kind of condition to the name of the condition and how to train with it.
KINDS = {
    "captions": ("captions", "--condition captions, and data with captions"),
    "labels": ("class labels", "--condition labels, and data with classes"),
    "features": ("text features", "--text-features, and data with captions"),
    "none": ("no condition", "--condition none"),
}


def start_from(
    model: nn.Module, path: Path, settings: dict[str, Any] | None = None, options: Collection[str] = SIZES
) -> str:
    """Load all weights that fit the model, and print the names of the other weights.

    Print a notice if the weights come from a run whose encoding differs from the one in ``settings``. ``options`` names
    the settings that determine the model.

    The head, class and register tokens, and the encoding may differ. The norms of linear attention may be missing.
    Weights of a vision transformer are resampled to the model's sizes. Weights of an image model are inflated for a
    video model. Weights of a timm model are converted to pixels in [-1, 1]. The model keeps its own features of the
    empty caption, because they come from the same text model as the features of the other captions.

    Returns:
        a hash of the weights.

    Raises:
        typer.BadParameter: if the file is missing or has no weights, or the weights have a different architecture. The
            model is then unchanged.
    """
    found, before = _read(path)
    settings = settings or {}
    digest, grid = digest_of(found), _find_trained_grid(before, found)
    found, own = (_drop_empty_captions(tensors) for tensors in (found, model.state_dict()))
    in_file = {name: tuple(value.shape) for name, value in found.items()}
    kernel = in_file.get("patch_embed.proj.weight", ())
    is_image = len(kernel) == 4
    trained_pixels = None if before else _find_other_pixels(settings, found)
    if trained_pixels:
        found = _convert_pixels(found, *trained_pixels)
    table_grid = _find_table_grid(before)
    found = _fit(found, model, table_grid) if isinstance(model, LrpeVisionTransformer) else dict(found)
    dropped = {"pos_embed"} & in_file.keys() - found.keys()
    for name, module in model.named_modules():
        if isinstance(module, FrequencyModule):
            module.upgrade_state_dict(found, f"{name}.")
            own.update({key: value for key, value in found.items() if key == f"{name}.sign"})
    # Skip a head with a different number of rows, because the classes differ.
    fits = {name: value for name, value in found.items() if name in own and value.shape == own[name].shape}
    wrong = _describe_other_table(model, table_grid) if "pos_embed" in fits else []
    wrong += [
        f"{name} is {in_file.get(name, tuple(found[name].shape))} in the file and {tuple(own[name].shape)} in the model"
        for name in found.keys() & own.keys() - fits.keys()
        if not name.startswith(("head.", "encoding."))
    ]
    wrong += [f"{name} is only in the file" for name in found.keys() - own.keys() if not name.startswith(LEFT_OUT)]
    fresh = (".decay.logit", *_list_norms(model))
    missing = [name for name in own.keys() - found.keys() if not name.startswith(NEW)]
    wrong += [f"{name} is only in the model" for name in missing if not name.endswith(fresh)]
    heads = _find_other_heads(before, _count_heads(model))
    if wrong or heads:
        details = f" ({'; '.join(sorted(wrong)[:3])})" if wrong else ""
        only_table = not heads and all(each.startswith("pos_embed ") for each in wrong)
        advice = _advise_table(before, settings) if only_table else _advise(before, settings, options, heads)
        raise typer.BadParameter(f"--weights {path}: {advice}. The weights are for a different architecture{details}")
    model.load_state_dict(fits, strict=False)
    if PartialState().is_main_process:
        new, unused = (_first_names(names - fits.keys()) for names in (own.keys(), found.keys() | dropped))
        said = [f"{text} {', '.join(names)}" for text, names in (("new:", new), ("left out:", unused)) if names]
        if trained_pixels:
            said.append("patch_embed converted from pixels with mean {} and std {}".format(*trained_pixels))
        typer.echo(f"Starting from {path}" + (f" ({'; '.join(said)})" if said else ""), err=True)
        sizes = {"patch": kernel[-1]} if is_image else {}
        for name in ("encoding", "patch"):  # patch weights were resampled
            ours, trained = (each.get(name) for each in (settings, sizes | before))
            if None not in (ours, trained) and ours != trained:
                typer.echo(f"{path} was trained with --{name} {trained}; this training uses {ours}", err=True)
        if (said := _describe_grids(grid, settings, is_run=bool(before))) is not None:
            typer.echo(f"{path} {said}", err=True)
        if is_image and settings.get("motion"):
            typer.echo(
                f"{path} was trained on images; this training shows only motion. To train on plain frames, pass "
                "--no-motion",
                err=True,
            )
    return digest


def _drop_empty_captions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if not name.startswith(EMPTY)}


def _find_trained_grid(before: dict[str, Any], weights: dict[str, Tensor]) -> tuple[int, ...] | None:
    """Return the patch grid of a run, or of a position table on a square grid. None means that the grid is unknown."""
    if {"size", "patch"} <= before.keys():
        return _find_grid(before)
    table, kernel = weights.get("pos_embed"), weights.get("patch_embed.proj.weight")
    if before or table is None or table.ndim != 3 or kernel is None or kernel.ndim != 4:
        return None
    number, prefix = table.shape[1], _count_prefix(weights)
    side = next((math.isqrt(n) for n in (number, number - prefix) if n > 0 and math.isqrt(n) ** 2 == n), None)
    return None if side is None else (side, side)


def _find_table_grid(settings: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the patch grid of a run's position table, or None for other weights."""
    return _find_grid({**settings, "reference": ""}) if {"size", "patch"} <= settings.keys() else None


def _describe_other_table(model: nn.Module, trained: tuple[int, ...] | None) -> list[str]:
    """Describe a position table for another grid than the video model's that has the same number of patches."""
    if not isinstance(model, LrpeVideoTransformer) or trained is None:
        return []
    grid: tuple[int, ...] = model.patch_embed.grid_size
    if trained == grid[-len(trained) :]:
        return []
    return [f"pos_embed has a grid of {_show_grid(trained)} in the file and {_show_grid(grid)} in the model"]


def _show_grid(grid: Iterable[int]) -> str:
    return "×".join(map(str, grid))


def _describe_grids(trained: tuple[int, ...] | None, settings: dict[str, Any], *, is_run: bool) -> str | None:
    """Describe the trained patch grid if this training's grid may differ, or return None.

    The option --reference sets the grid of this training. ``is_run`` states whether the weights come from a run, which
    records its grid if it has one.
    """
    if "reference" not in settings or not has_coordinates(_part_of(settings, "model")):
        return None
    if trained is None:
        if is_run or settings["reference"]:
            return None
        size = "FRAMESxSIZE" if "frames" in settings else "SIZE"
        return f"does not record its image size. If it was trained at another size, also pass --reference {size}"
    grid, recorded = _find_grid(settings), trained
    if len(grid) == 3 and (settings["causal"] or len(trained) == 2):  # the time axis can't be rescaled, or is new
        trained = grid[0], *trained[-2:]
    if trained == grid or max(trained) == 1:
        return None
    frames, (height, width) = trained[:-2], (number * settings["patch"] for number in trained[-2:])
    if frames and height != width:  # --reference of `train video` is square
        return None
    reference = "x".join([*(str(number * settings["tubelet"]) for number in frames), show_size(height, width)])
    trained_text, grid_text = _show_grid(recorded), _show_grid(grid)
    given = settings["reference"]
    ours = f"--reference {given} maps positions onto" if given else "this training has"
    return (
        f"was trained with {trained_text} patches; {ours} {grid_text}. To map their positions onto the trained grid, "
        f"pass --reference {reference}"
    )


def _find_grid(settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the patch grid ([time,] height, width) that positions cover in a run on images or videos."""
    found, patch = [int(part) for part in find_reference(settings).split("x")], settings["patch"]
    if "tubelet" in settings:
        return found[0] // settings["tubelet"], found[1] // patch, found[1] // patch
    return found[0] // patch, found[-1] // patch


def _count_heads(model: nn.Module) -> int | None:
    """Return the number of heads of the first attention layer, or None if that number is unknown."""
    if isinstance(model, CausalLm):
        return model.config.num_heads
    modules = (m for m in model.modules() if not isinstance(m, FrequencyModule))
    found = (getattr(m, "num_heads", None) for m in modules)
    return next((number for number in found if isinstance(number, int)), None)


def _list_norms(model: nn.Module) -> list[str]:
    """Return the names of the norms after linear attention. The weights of softmax layers lack these norms."""
    attributes = [(getattr(m, "attention", None), getattr(m, "linear", None)) for m in model.modules()]
    if not any(attention == "linear" or linear is True for attention, linear in attributes):
        return []
    return [name for name in model.state_dict() if any(norm in name for norm in NORMS)]


def _first_names(names: Iterable[str]) -> list[str]:
    """Return the first part of each weight name. All norms after attention get the same name."""
    norms = [norm.strip(".") for norm in NORMS]
    return sorted({next((norm for norm in norms if f".{norm}." in name), name.split(".")[0]) for name in names})


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the averaged weights of a run, or the weights in a file that timm supports.

    Returns:
        the weights, and the settings of the run, or {} if the settings are unknown.
    """
    file = path / "checkpoint.pt" if path.is_dir() else path
    if not file.is_file():
        raise typer.BadParameter(
            f"--weights {path}: no such file, or no checkpoint.pt in the folder{_explain_timm_weights(str(path))}"
        )
    settings: dict[str, Any] = {}
    try:
        content = None if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
        if isinstance(content, dict) and {"format", "settings", "model"} <= content.keys():
            state = read_checkpoint(file)
            return state.get("average", state["model"]), state["settings"]
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                settings = json.loads((opened.metadata() or {}).get("settings", "{}"))
        found: Any = load_state_dict(str(file), weights_only=True)
    except typer.BadParameter:
        raise
    except Exception as error:  # readers can raise any exception for unsupported data
        raise typer.BadParameter(
            f"--weights {path}: expected named tensors, as saved by timm or a training run, got a file that "
            f"can't be read ({first_sentence(error)})"
        ) from error
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise typer.BadParameter(f"--weights {path}: expected named tensors, as saved by timm, got other data")
    return found, settings


def _explain_timm_weights(name: str) -> str:
    """If ``name`` is a timm model, return advice on saving pretrained weights, to be appended to an error."""
    if not is_model(name):
        return ""
    return (
        f". To start from timm's weights, save them in Python with torch.save(timm.create_model({name!r}, "
        f"pretrained=True).state_dict(), '{name}.pt'), and pass --weights {name}.pt"
    )


def _find_other_heads(before: dict[str, Any], num_heads: int | None) -> int | None:
    """Return a run's number of heads if it differs from the model's. The shapes of the weights don't reveal it."""
    arguments = _part_of(before, "model")
    heads = arguments.get("num_heads", num_heads) if arguments else before.get("heads", num_heads)
    return None if num_heads in (None, heads) else heads


def _part_of(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a nested dictionary in a run's settings, such as "model" or "condition", or {} if there is none."""
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def _advise(before: dict[str, Any], settings: dict[str, Any], options: Collection[str], heads: int | None) -> str:
    """Return advice on the training options that build the same model as the run with the settings ``before``.

    ``heads`` is the number of heads in that run if it differs.
    """
    trained, now = (_part_of(each, "condition") for each in (before, settings))
    if trained and now and trained["kind"] != now["kind"]:
        (given, remedy), (ours, _) = KINDS[trained["kind"]], KINDS[now["kind"]]
        return f"the weights were trained with {given}, but this run uses {ours}; pass {remedy}, or leave out --weights"
    if trained and now and len(trained.get("classes", ())) != len(now.get("classes", ())):
        return f"pass data with its {len(trained['classes'])} classes, or leave out --weights"
    differ = _list_other_values(before, settings, options)
    models = [_part_of(each, "model").get("model", "") for each in (before, settings)]  # names of timm models
    if models[1] and not before:
        return "pass --model NAME, the architecture of these weights, or leave out --weights"
    ratios = [_part_of(each, "model").get("mlp_ratio", 4.0) for each in (before, settings)]
    if before and settings and not any(models) and ratios[0] != ratios[1]:
        mlp = "these weights have an MLP ratio of {:g}, and this command only builds models with {:g}".format(*ratios)
        return f"leave out --weights, because {mlp}"
    if models[0] == models[1]:
        differ.pop("model", None)
    else:
        sizes = ("patch", "dim", "depth", "heads") if models[0] else ()  # a timm model has fixed sizes
        differ = {name: value for name, value in differ.items() if name not in sizes} | {"model": models[0]}
    named = {name: value for name, value in differ.items() if name not in FREE}
    named = named or ({"heads": heads} if heads else differ)
    if not named:
        known = [_as_option(name) for name in SIZES if name in options]
        return f"pass that model's {', '.join(known) or 'options'}, or leave out --weights"
    return f"pass {' '.join(_as_option(name, value) for name, value in named.items())}"


def _advise_table(before: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return advice on how to start from weights whose position table has a different size."""
    differ = _list_other_values(before, settings, ("frames", "size"))
    remedy = " ".join(_as_option(name, value) for name, value in differ.items())
    return f"pass {remedy or 'the --size that it was trained at'}, or an --encoding other than learned"


def _list_other_values(before: dict[str, Any], settings: dict[str, Any], options: Collection[str]) -> dict[str, Any]:
    """Return the options whose values differ, with their values in ``before``."""
    shared = [name for name in options if name in before and name in settings]
    # The size is a string in runs on images, and an integer in runs on videos.
    return {name: before[name] for name in shared if str(before[name]) != str(settings[name])}


def _as_option(name: str, value: Any = True) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{option}"
    return f"--{option} {shlex.quote(str(value))}"


def _count_prefix(weights: dict[str, Tensor]) -> int:
    """Return the number of class and register tokens."""
    return sum(weights[name].shape[1] for name in PREFIX if name in weights)


def _count_prefix_rows(weights: dict[str, Tensor]) -> int:
    """Return how many rows of the position table belong to class and register tokens: none if the table is square."""
    number = weights["pos_embed"].shape[1]
    return 0 if math.isqrt(number) ** 2 == number else _count_prefix(weights)


def _find_other_pixels(settings: dict[str, Any], found: dict[str, Tensor]) -> tuple[tuple[float, ...], ...] | None:
    """Return the mean and std of the pixels of --model's pretrained weights, or None if these pixels are in [-1, 1]."""
    name = _part_of(settings, "model").get("model")
    known = get_pretrained_cfg(name) if name else None
    kernel = found.get("patch_embed.proj.weight")
    if known is None or kernel is None or kernel.ndim != 4 or kernel.shape[1] != len(known.mean):
        return None
    pixels = tuple(known.mean), tuple(known.std)
    return None if {*known.mean, *known.std} == {0.5} else pixels


def _convert_pixels(found: dict[str, Tensor], mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Tensor]:
    """Convert weights trained on normalised pixels to pixels in [-1, 1], with the same outputs."""
    kernel = found["patch_embed.proj.weight"]
    scale = 0.5 / torch.tensor(std, dtype=torch.float64)
    offset = (0.5 - torch.tensor(mean, dtype=torch.float64)) / torch.tensor(std, dtype=torch.float64)
    shift = (kernel.double() * offset[:, None, None]).sum((1, 2, 3))
    converted = {"patch_embed.proj.weight": (kernel.double() * scale[:, None, None]).to(kernel.dtype)}
    bias, table = "patch_embed.proj.bias", "pos_embed"
    if bias in found:
        converted[bias] = (found[bias].double() + shift).to(found[bias].dtype)
    elif table in found:  # models that normalise patches first have no bias
        rows = torch.arange(found[table].shape[1]) >= _count_prefix_rows(found)
        converted[table] = (found[table].double() + rows[:, None] * shift).to(found[table].dtype)
    return {**found, **converted}


def _fit(
    found: dict[str, Tensor], model: LrpeVisionTransformer, table_grid: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Rename weights to the model's names, and resample the weights to the model's sizes.

    ``table_grid`` is the patch grid of a run's position table. If it is None, timm assumes a square grid.
    """
    found = dict(found)
    kernel, table = found.get("patch_embed.proj.weight"), found.get("pos_embed")
    channels = model.patch_embed.proj.weight.shape[1]
    if kernel is not None and kernel.ndim == 4 and kernel.shape[1] != channels:
        if kernel.shape[1] == 1:  # grey images
            found["patch_embed.proj.weight"] = kernel.expand(-1, channels, -1, -1) / channels
        elif kernel.shape[1] == 3:
            found["patch_embed.proj.weight"] = adapt_input_conv(channels, kernel)
    tables: dict[str, Tensor] = {}
    if model.pos_embed is None:
        found.pop("pos_embed", None)
    elif table is not None and table_grid is not None and not isinstance(model, LrpeVideoTransformer):
        tables["pos_embed"] = _fit_table(found.pop("pos_embed"), table_grid, model)
    elif table is not None and model.num_prefix_tokens == 0:
        found["pos_embed"] = table[:, _count_prefix_rows(found) :]
    found = rename_final_norm(found, model)
    fit = inflate_unchecked if isinstance(model, LrpeVideoTransformer) else checkpoint_filter_fn
    filtered = fit(found, model)
    # Remove the entries that the filter took from the model.
    added = {
        name
        for name in model.state_dict().keys() - found.keys()
        if name.startswith("encoding.") or name.endswith(".decay.logit")
    }
    return {name: value for name, value in filtered.items() if name not in added} | tables


def _fit_table(table: Tensor, grid: tuple[int, ...], model: LrpeVisionTransformer) -> Tensor:
    """Resample a position table of an image run to the model's patch grid. Drop the rows of prefix tokens it lacks."""
    prefix, own = table.shape[1] - math.prod(grid), model.patch_embed.grid_size
    if model.num_prefix_tokens == 0 or model.no_embed_class:
        table, prefix = table[:, prefix:], 0
    return resample_abs_pos_embed(table, list(own), list(grid), num_prefix_tokens=prefix)


def export_weights(trainer: Trainer) -> None:
    """Write the averaged weights to model.safetensors, or the current weights if there are no averaged weights."""
    weights: dict[str, Any] = get_model_state_dict(trainer.averaged, options=WHOLE)  # gathered by all processes
    if trainer.accelerator.is_main_process:
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
        about = {"settings": json.dumps(trainer.settings), "step": str(trainer.step)}
        save_whole(trainer.config.out / EXPORT, lambda part: save_file(tensors, part, about))
