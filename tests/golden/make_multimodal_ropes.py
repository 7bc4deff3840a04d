"""Compute positions, cos and sin of multimodal schemes with their original code in float64: multimodal_ropes.npz.

    python tests/golden/make_multimodal_ropes.py MULTIMODAL_ROPES VIDEOROPE HOPE

MULTIMODAL_ROPES: a checkout of github.com/JJJYmmm/Multimodal-RoPEs at cd413b9e239e916e03234e9b4b64c3420aeb5419.
VIDEOROPE: videorope-transformer/modeling_videorope.py of github.com/Wiselnn570/VideoRoPE at
7712ca3f52b795284e0453badc6cf1642c1368c4. HOPE: modeling_hope.py of github.com/hrlics/HoPE at
85b76c03abcf9624b6efd27d1af1bc11ce9899c4. From these two files, only the functions that compute positions and
frequencies run, without the classes around them, which need a different version of transformers.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from float64 import Float64

# Segments (text tokens, or shapes (T, H, W) of images and videos), and head_dim.
LAYOUTS = [
    ([3, (1, 2, 3), 2], 128),
    ([2, (1, 3, 5), 3, (3, 2, 2), 4], 32),
    ([1, (2, 5, 3), 1, (1, 1, 1), 2], 32),
]
IMAGE, VIDEO, START, TEXT = 1, 2, 3, 100
BASE = 5e6
# circlerope fails with a dff_rate and more than one frame, because it repeats the frames twice.


def sections(head_dim: int, shares: tuple[int, ...]) -> list[int]:
    return [share * head_dim // 2 // sum(shares) for share in shares]


def ids_of(segments: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    ids: list[int] = []
    for i, segment in enumerate(segments):
        if isinstance(segment, int):
            ids += [TEXT] * segment
            if i + 1 < len(segments):
                ids[-1] = START
        else:
            ids += [IMAGE] * (segment[0] * segment[1] * segment[2])
    grids = [(t, 2 * h, 2 * w) for t, h, w in (s for s in segments if not isinstance(s, int))]
    return torch.tensor([ids]), torch.tensor(grids)


def config(head_dim: int) -> SimpleNamespace:
    parameters = {"rope_type": "default", "rope_theta": BASE}
    return SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=2), image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, max_position_embeddings=4096, head_dim=head_dim, rope_parameters=parameters,
        rope_scaling=parameters, standardize_rope_params=lambda: None,
    )  # fmt: skip


def multimodal(name: str, head_dim: int, segments: list[Any], **options: Any) -> dict[str, torch.Tensor]:
    from multimodal_ropes.entry import get_multimodal_rope

    index, embedding = get_multimodal_rope(name, dim=head_dim, base=BASE, **options)
    ids, grids = ids_of(segments)
    positions, _ = index(SimpleNamespace(config=config(head_dim)), input_ids=ids, image_grid_thw=grids)
    cos, sin = embedding(config(head_dim))(torch.zeros(1), positions)
    half = head_dim // 2  # both halves are equal
    return {"positions": positions[:, 0].T, "cos": cos[0, ..., :half], "sin": sin[0, ..., :half]}


def functions_of(path: str, *names: str) -> dict[str, Any]:
    """Extract functions and methods from a file without running the rest."""
    tree = ast.parse(Path(path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    space: dict[str, Any] = {"torch": torch}
    header = "from __future__ import annotations\nimport random\nfrom typing import *\n"
    code = header + "\n\n".join(ast.unparse(node) for node in found)
    exec(compile(code, path, "exec"), space)
    return space


def of_paper(
    path: str, index: str, turn: str, head_dim: int, segments: list[Any], **options: Any
) -> dict[str, torch.Tensor]:
    space = functions_of(path, index, turn, "rotate_half")
    ids, grids = ids_of(segments)
    positions, _ = space[index](
        SimpleNamespace(config=config(head_dim)), ids, grids, None, torch.ones_like(ids), **options
    )
    omega = 1 / BASE ** (torch.arange(0, head_dim, 2) / head_dim)
    angles = positions[..., None].double() * omega.double()  # (3, 1, N, C)
    angles = torch.cat([angles, angles], dim=-1)
    unit = torch.zeros(1, 1, ids.shape[1], head_dim)
    unit[..., : head_dim // 2] = 1
    turned, _ = space[turn](unit, unit, angles.cos(), angles.sin(), sections(head_dim, (2, 3, 3)))
    cos, sin = turned[0, 0].chunk(2, dim=-1)
    return {"positions": positions[:, 0].T, "cos": cos, "sin": sin}


def main(repository: str, videorope: str, hope: str) -> None:
    sys.path.insert(0, repository)
    found = {}
    for number, (segments, head_dim) in enumerate(LAYOUTS):
        chunk = sections(head_dim, (2, 3, 3))
        rest = head_dim // 2 - 2 * (head_dim // 2 * 5 // 16)
        stride = [rest, *[head_dim // 2 * 5 // 16] * 2]
        turn = "apply_m_modify_multimodal_rotary_pos_emb"
        with Float64():
            made = {
                "rope": multimodal("vanilla-rope", head_dim, segments),
                "mrope": multimodal("mrope", head_dim, segments, mrope_section=chunk, temporal_stride=2),
                "mrope_interleave": multimodal(
                    "mrope-interleave", head_dim, segments, mrope_section=stride, temporal_stride=3, spatial_reset=True
                ),
                "mhrope": multimodal(
                    "mhrope", 16, segments, mrope_section=[2, 3, 3], num_key_value_heads=8, temporal_stride=1,
                    spatial_reset=True,
                ),
                "circle_rope": multimodal(
                    "circlerope", head_dim, segments, mrope_section=chunk, temporal_stride=1.0, move_to_origin=True,
                    dff_rate=0.0 if number else 0.3, method="circle", radius=10, alpha=0.5,
                ),
                "v2pe": multimodal("v2pe", head_dim, segments, visual_stride=2.0),
                "ilrope": multimodal("ilrope", head_dim, segments, mrope_section=stride, temporal_stride=1.0),
                "omnirope": multimodal("omnirope", head_dim, segments, mrope_section=chunk, temporal_stride=2.0),
                "mm_rope": multimodal(
                    "mmrope", head_dim, segments, mrope_section=chunk, temporal_stride=1.0,
                    position_scale=(4.0, 8.0, 8.0),
                ),
                "grape": multimodal("grape", head_dim, segments, mrope_section=chunk, temporal_stride=1.0),
                "videorope": of_paper(videorope, "get_t_scale_rope_index", turn, head_dim, segments, scale_factor=2.0),
                "hope": of_paper(
                    hope, "get_dynamic_rope_index", "apply_hybrid_multimodal_rotary_pos_emb", head_dim, segments,
                    scale_factors=[0.75],
                ),
            }  # fmt: skip
        for name, tensors in made.items():
            for key, tensor in tensors.items():
                found[f"{name}/{number}/{key}"] = tensor.numpy()
    path = Path(__file__).with_name("multimodal_ropes.npz")
    np.savez_compressed(path, **found)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
