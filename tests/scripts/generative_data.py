"""Small datasets for the tests of generative training: classes, a VAE, latents, text features and videos."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from test_train_video import DECODERS, write_video
from train_commands import invoke

KINDS = (
    "labels", "none", "latents", "features", "clips", "film latents", "buckets", "bucketed latents", "bucketed clips",
    "shards", "hub",
)  # fmt: skip
RATIOS = ((8, 16), (12, 12), (16, 8))  # heights and widths
COLOURS = {"blue": (0, 0, 255), "green": (0, 200, 0), "red": (255, 0, 0)}
SMALL: dict[str, Any] = {
    "steps": 4, "batch": 4, "warmup": 1, "log_every": 1, "save_every": 2, "ema": 0.5, "lr": 3e-3, "dim": 32, "depth": 1,
    "heads": 2, "text_dim": 16, "text_depth": 1, "parts": 4, "sample_steps": 1, "samples": 2, "test_samples": 4,
    "tensorboard": False, "device": "cpu", "progress": False,
}  # fmt: skip
PIXELS: dict[str, Any] = {"size": 8, "test_size": 12}
CLIPS: dict[str, Any] = {"size": 8, "test_size": 0, "frames": 3, "every": 2, "segment": 12}


def write_classes(folder: Path, each: int = 8) -> Path:
    """Write folder/CLASS/i.png, plain images with a bright left half."""
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = np.full((8, 8, 3), colour, np.uint8)
            pixels[:, :4] = np.minimum(pixels[:, :4].astype(int) + 10 * i + 20, 255)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def write_captions(folder: Path, each: int = 6) -> Path:
    """Write plain images with metadata.jsonl."""
    folder.mkdir(parents=True)
    rows = []
    for i in range(each):
        for name, colour in COLOURS.items():
            Image.new("RGB", (8, 8), colour).save(folder / f"{name}{i}.png")
            rows.append(json.dumps({"file_name": f"{name}{i}.png", "text": f"a {name} tile" + " again" * i}))
    (folder / "metadata.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def write_ratios(folder: Path, each: int = 16) -> Path:
    """Write folder/CLASS/i.png, noisy images of three aspect ratios: wide, square and tall in turn."""
    random = np.random.default_rng(0)
    for name in COLOURS:
        (folder / name).mkdir(parents=True)
        for i in range(each):
            shape = RATIOS[i % 3]
            pixels = random.integers(0, 100, (*shape, 3)).astype(np.uint8) + np.array(COLOURS[name], np.uint8) // 2
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def write_captioned_shards(folder: Path, counts: tuple[int, ...] = (10, 8, 6)) -> Path:
    """Write webdataset shards of images of three aspect ratios, with captions and classes."""
    import webdataset

    folder.mkdir(parents=True)
    index = 0
    for shard, count in enumerate(counts):
        with webdataset.TarWriter(str(folder / f"train-{shard:03}.tar")) as writer:
            for _ in range(count):
                file, name = io.BytesIO(), list(COLOURS)[index % 3]
                Image.new("RGB", RATIOS[index % 3][::-1], (10 * index, 128, *COLOURS[name][:1])).save(file, "PNG")
                writer.write({
                    "__key__": f"{index:05}", "png": file.getvalue(), "cls": str(index % 3).encode(),
                    "txt": f"a {name} tile", "json": {"colour": name},
                })  # fmt: skip
                index += 1
    return folder


def write_hub(folder: Path) -> Path:
    """Write a Hugging Face dataset of images with captions and classes, with a test split."""
    import datasets

    features = datasets.Features({
        "image": datasets.Image(), "label": datasets.ClassLabel(names=sorted(COLOURS)),
        "text": datasets.Value("string"),
    })  # fmt: skip
    numbers = range(24)
    rows = {
        "image": [Image.new("RGB", RATIOS[i % 3][::-1], (10 * i, 128, 0)) for i in numbers],
        "label": [i % 3 for i in numbers], "text": [f"a {sorted(COLOURS)[i % 3]} tile" for i in numbers],
    }  # fmt: skip
    data = datasets.Dataset.from_dict(rows, features=features)
    parts = {"train": data.select(range(18)), "test": data.select(range(18, 24))}
    datasets.DatasetDict(parts).save_to_disk(str(folder))
    return folder


def write_vae(folder: Path, channels: int = 3) -> Path:
    """Save a VAE with random weights, which halves the size."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=channels, norm_num_groups=4, sample_size=8,
        scaling_factor=2.0, shift_factor=0.25,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def write_text_model(folder: Path, kind: str = "t5") -> Path:
    """Save a T5 or a CLIP text model with random weights, and a word tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<s>", "<unk>", "a", "tile", "again", *COLOURS]
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    vocabulary.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="$A <s>", special_tokens=[("<s>", 1)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    if kind == "t5":
        config: Any = transformers.T5Config(vocab_size=9, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        transformers.T5EncoderModel(config).save_pretrained(folder)
    else:
        config = transformers.CLIPTextConfig(
            vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        transformers.CLIPTextModel(config).save_pretrained(folder)
    return folder


def write_films(folder: Path, shapes: tuple[tuple[int, int], ...] = ((16, 16),)) -> Path:
    """Write CLASS/i.mp4, videos that get brighter, in two classes, with these shapes in turn."""
    for c, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for i in range(2):
            shape = (1, *shapes[(c + i) % len(shapes)], 3)
            frames = np.arange(36)[:, None, None, None] * np.full(shape, 3) + 100 * c + 10 * i
            write_video(folder / name / f"{i}.mp4", frames.astype(np.uint8), DECODERS[0])
    return folder


def write_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Write every kind of data, and return training options for each."""
    classes, captions = write_classes(folder / "classes"), write_captions(folder / "captions")
    vae, text = write_vae(folder / "vae"), write_text_model(folder / "text")
    films, ratios = write_films(folder / "films"), write_ratios(folder / "ratios")
    wide_films = write_films(folder / "wide-films", ((16, 32), (16, 16)))
    shards, hub = write_captioned_shards(folder / "shards"), write_hub(folder / "hub")
    for args in (
        ("latents", "--vae", vae, "--data", classes, "--out", folder / "latents", "--size", 8, "--flip"),
        ("latents", "--vae", vae, "--data", films, "--out", folder / "film-latents", "--size", 8),
        (
            "latents",
            "--vae",
            vae,
            "--data",
            ratios,
            "--out",
            folder / "bucketed-latents",
            "--size",
            8,
            "--flip",
            "--max-ratio",
            2,
            "--mix-sizes",
            12,
        ),
        ("features", "--encoder", text, "--data", captions, "--out", folder / "features"),
    ):
        done = invoke(*args, "--device", "cpu")
        assert done.exit_code == 0, done.output
    latents, buckets = {"patch": 1, "test_size": 0}, {"size": 8, "test_size": 16, "max_ratio": 2.0}
    return {
        "labels": {"data": classes, **PIXELS, "flip": True},
        "none": {"data": classes, **PIXELS, "condition": "none"},
        "latents": {"data": folder / "latents", "flip": True, **latents},
        "features": {"data": captions, "text_features": folder / "features", **PIXELS},
        "clips": {"data": films, **CLIPS},
        "film latents": {"data": folder / "film-latents", **CLIPS, **latents},
        "buckets": {"data": ratios, **buckets, "mix_sizes": "12", "flip": True},
        "bucketed latents": {"data": folder / "bucketed-latents", "flip": True, **latents},
        "bucketed clips": {"data": wide_films, **CLIPS, "max_ratio": 2.0, "mix_sizes": "12"},
        "shards": {"data": shards, **buckets},
        "hub": {"data": hub, **PIXELS, "condition": "labels", "flip": True},
    }
