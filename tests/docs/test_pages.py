"""Code in the README and documentation runs, links resolve, and claims match the results."""

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest
from lrpe_md.scripts.common.markdown import PAGES
from lrpe_md.scripts.visualize import gallery

import lrpe_md
from lrpe_md import integrations
from lrpe_md.frequencies.axial import AxisMapName
from lrpe_md.reference import ACTIVATIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
ELSEWHERE = {
    "schemes.md",
    "runtime.md",
    "image.md",
    "recipe.md",
    "several-gpus.md",
    "your-own-training.md",
}  # separate tests run their code
ALL = [README, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PRINTED = {  # expected output by page; the code on other pages prints nothing
    "README.md": [
        "torch.Size([2, 12, 281, 64])", "torch.Size([2, 1000])",
        "adapted: model.layers.0.self_attn (Qwen3Attention): apply_rotary_pos_emb",
    ],
    "concepts.md": ["True", "torch.Size([32])"],
    "diffusion.md": ["torch.Size([2, 3, 24, 16])", "torch.Size([2, 3, 16, 16])", "torch.Size([2, 3, 16, 16])"],
    "functions.md": ["True"],
    "index.md": ["torch.Size([2, 3, 281, 64])"],
    "libraries.md": ["torch.Size([2, 1000])", "True", "1.138629436111989"],
    "linear-attention.md": ["torch.Size([2, 8, 281, 64])", "True", "True"],
    "modules.md": ["[('decay', 0.001, 0.05), ('no_decay', 0.001, 0.0), ('frequencies', 0.0001, 0.0)]"],
    "presets.md": ["577"],
    "text.md": ["True"],
    "video.md": [*["torch.Size([1, 10])"] * 2, "True", "[1.0, 2.0]", "torch.Size([1, 16, 5, 8, 12])"],
    "which-encoding.md": ["torch.Size([2, 1000])"],
    "your-own-code-base.md": ["torch.Size([1, 96, 64])", "True", "True", "torch.Size([1, 24, 31, 128])"],
}  # fmt: skip


def blocks(path):
    text = path.read_text(encoding="utf-8")
    return [part.split("```")[0] for part in text.split("```python\n")[1:]]


RUN = [path for path in ALL if blocks(path) and path.name not in ELSEWHERE]


def test_every_page_with_code_is_expected():
    assert {path.name for path in RUN} == set(PRINTED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_code_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    space, printed = {"__name__": "page"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks(path):
            exec(compile(block, str(path), "exec"), space)
    lines = printed.getvalue().splitlines()
    expected = PRINTED[path.name]
    assert [line for line in lines if line in expected] == expected
    assert "False" not in lines


# --- links -----------------------------------------------------------------------------------------------------------


def anchors(path):
    """Return the anchors of the headings, as GitHub and the site generate them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    return {as_anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def as_anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), target
        assert place.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(place), target
        assert place.suffix != ".png" or place.stat().st_size < 300_000, target


def code_of_section(path, anchor):
    """Return the Python code under a heading, including its subsections."""
    code, level = "", None
    for block, hashes, heading in re.findall(
        r"^```(.*?)^```$|^(#+) (.*?)$", path.read_text(encoding="utf-8"), re.M | re.S
    ):
        if hashes and level is not None and len(hashes) <= level:
            break
        if hashes and as_anchor(heading) == anchor:
            level = len(hashes)
        if level is not None and block.startswith("python\n"):
            code += block.removeprefix("python\n")
    return code


def imported(code):
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in node.names}


@pytest.mark.parametrize("path", [path for path in ALL if blocks(path)], ids=lambda path: path.name)
def test_linked_sections_import_what_they_use(path):
    """The code of a section that another page links to runs without the imports above it."""
    links = "".join(page.read_text(encoding="utf-8") for page in ALL if page != path)
    for anchor in set(re.findall(rf"{path.name}#([\w-]+)\)", links)):
        code = code_of_section(path, anchor)
        used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
        assert not (used & imported("\n".join(blocks(path)))) - imported(code), anchor


def test_anchors_are_checked(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title, `code`\n\n```\n# no heading\n```\n")
    assert anchors(page) == {"a-title-code"}


# --- the README ------------------------------------------------------------------------------------------------------


def test_readme_fits_one_page():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert "<!--" not in text
    for name in ("index", "concepts", "which-encoding", "performance"):
        assert f"(docs/{name}.md)" in text


def test_rows_of_the_readme_run():
    """The code in rows of "you have, you write" runs if it only needs q, k and v."""
    import torch

    import lrpe_md

    grid, (q, k, v) = lrpe_md.Grid((2, 3)), torch.randn(3, 1, 4, 6, 64)
    given = {**vars(lrpe_md), "q": q, "k": k, "v": v, "T": 1, "H": 2, "W": 3, "grid": grid}
    given |= {"cos": torch.rand(6, 32), "sin": torch.rand(6, 32)}
    run = []
    for line in README.read_text(encoding="utf-8").splitlines():
        code = re.search(r"\| `([^`]*)`", line)
        if (
            line.startswith("| ")
            and code
            and "model" not in code[1]
            and "..." not in code[1]
            and "lrpe-md" not in code[1]
        ):
            exec(code[1], given)
            run.append(code[1].split("(")[0])
    assert run == ["q, k = RotateMd", "m = PresetMd", "PresetMd", "rotate", "LinearAttention"]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


STEPS = {  # rows of the README: our row and timm's row in the table of training steps
    "cost of axial RoPE in a training step: time, memory": ("**axial**", "timm-axial"),
    "the same with `keep_encoded=False`": ("**axial-again**", None),
    "cost of mixed RoPE in a training step: time, memory": ("**mixed**", "timm-mixed"),
}


def column(page, name):
    """Return the column with this name, as a dict by the first cell of each row."""
    lines = (PAGES / page).read_text(encoding="utf-8").splitlines()
    (start,) = (i for i, line in enumerate(lines) if name in cells(line))
    rows = [cells(line) for line in lines[start : lines.index("", start)]]
    return {row[0]: row[rows[0].index(name)] for row in rows}


def test_readme_shows_measured_training_steps():
    """Both front pages show compiled steps, in which the CPU is not the bottleneck."""
    measured = {
        name: re.sub(r" ± [\d.]+", "", cell) for name, cell in column("training-steps.md", "vit_b, compiled").items()
    }
    text = README.read_text(encoding="utf-8")
    shown = {name: others for name, *others in map(cells, text.splitlines()) if name in STEPS}
    assert shown == {
        name: [f"**{measured[ours]}**", f"{measured[timm]} (timm)" if timm else ""]
        for name, (ours, timm) in STEPS.items()
    }
    ours, theirs = (measured[name].split(",")[0] for name in ("**axial**", "timm-axial"))
    claim = f"Axial RoPE adds **{ours.removeprefix('+')}** to the step time of a compiled ViT-B on an H100"
    home = " ".join((DOCS / "index.md").read_text(encoding="utf-8").split())
    assert f"{claim}; timm's implementation adds {theirs.removeprefix('+')}." in home
    assert "(host)" not in text


def test_readme_shows_measured_gains_of_adapted_models():
    rows = pd.read_csv(ROOT / "scripts" / "results" / "adapted-training.csv")
    rows = rows.drop_duplicates(["model", "mode", "encoding"], keep="last")
    changes = 100 * rows[rows.encoding == "adapted"].groupby("mode").ratio_p50.agg(["min", "max"]) - 100
    text = README.read_text(encoding="utf-8")
    (low, high), (least, most) = -changes.loc["inference", ["max", "min"]], changes.loc["compiled"]
    assert f"**{low:.0f} to {high:.0f}% less time**" in text
    assert f"from {-least:.0f}% less to {most:.1f}% more time" in text


def test_readme_shows_measured_accuracy():
    rows = pd.read_csv(ROOT / "scripts" / "results" / "ablate-image" / "results.csv", keep_default_na=False)
    rows = rows[(rows.attention == "softmax") & (rows["size"] == "56x56") & (rows.positions == "rescaled")]
    means = rows.astype({"value": float}).groupby("encoding").value.mean()
    shown = f"**{means['rotate']:.1f}%** (RoPE) | {means['sincos']:.1f}% (sine-cosine table), "
    assert f"{shown}{means['learned']:.1f}% (learned table)" in README.read_text(encoding="utf-8")


def test_the_image_guide_expects_the_accuracy_of_the_default_base():
    rows = pd.read_csv(ROOT / "scripts" / "results" / "ablate-image-bases" / "results.csv", keep_default_na=False)
    rows = rows[(rows.encoding == "rotate:base=10000") & (rows.attention == "softmax") & (rows.positions == "rescaled")]
    at = rows.astype({"value": float}).groupby("size").value.mean()
    expected = f"accuracy of {at['28x28']:.0f}% at 28 pixels and, with rescaled positions, {at['40x40']:.0f}% at 40"
    text = " ".join((DOCS / "image.md").read_text(encoding="utf-8").split())
    assert f"{expected} and {at['56x56']:.0f}% at 56 pixels" in text


def test_readme_counts_models_and_presets():
    text = README.read_text(encoding="utf-8")
    files = (ROOT / "scripts" / "results" / "adapters").glob("*.csv")
    models = sum(path.read_text(encoding="utf-8").count(",adapted,") for path in files)
    assert f"[{models} models](docs/results/adapted-models.md)" in text
    count = f"any of the {len(lrpe_md.list_presets()) - 1} [other presets]"
    assert count in text, f"write {count!r} in the README"


def test_links_of_pictures_in_the_readme():
    """The picture for dark pages belongs to the same plot."""
    pairs = re.findall(r'srcset="([^"]+)-dark\.png">\n  <img src="([^"]+)\.png"', README.read_text(encoding="utf-8"))
    assert len(pairs) == 3
    for dark, light in pairs:
        assert dark == light
        assert all((ROOT / f"{dark}{kind}.png").stat().st_size < 300_000 for kind in ("", "-dark"))


def test_code_fits_on_the_page():
    """Code in the guides fits next to both menus. Otherwise, the page hides the table of contents."""
    wide = dict.fromkeys(("architecture.md", "diffusion.md", "video.md", "your-own-code-base.md"), 150)
    for path in (README, *DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        lines = [line for part in re.findall(r"```\w+\n(.*?)```", text, re.S) for line in part.splitlines()]
        assert max(map(len, lines), default=0) <= wide.get(path.name, 92), path.name


def test_recommendation_matches_results():
    """Both pages give the same advice, and the image comparison supports it."""
    advice = "In linear attention, use rotation with relu, or cosine with silu"
    mixed = "no better at the training size"  # at some other sizes, they are better
    for path in (README, DOCS / "which-encoding.md"):
        found = " ".join(path.read_text(encoding="utf-8").split())
        assert advice in found
        assert mixed in found
    text = (PAGES / "ablate-image.md").read_text(encoding="utf-8")
    extrapolated, rescaled = text.split("Difference from ")[0].split("Rescaled positions")
    rows = [
        {tuple(cells(line)[:2]): [float(c.split()[0]) for c in cells(line)[2:]] for line in part.splitlines()
         if re.match(r"\| [\w-]+ \| (softmax|linear) \| \d", line)}
        for part in (extrapolated, rescaled)
    ]  # fmt: skip
    assert max(rows[1], key=lambda name: rows[1][name][0]) in {("rotate", "linear"), ("rotate", "softmax")}
    for name in (("rotate", "softmax"), ("cosine-silu", "linear")):
        assert all(b > a for a, b in zip(rows[0][name][1:], rows[1][name][1:], strict=True)), name


def test_comparison_of_bases_matches_results():
    """The guide counts the sizes at which rotations with base 10,000 and 100 differ, with mapped positions."""
    found = []
    for task in ("image", "digits", "diffusion"):
        text = (PAGES / f"ablate-{task}-bases.md").read_text(encoding="utf-8").split("**Difference from ")[1]
        rows = text.split("Rescaled positions")[1].splitlines()
        found += [
            cell
            for row in rows
            if re.match(r"\| rotate:base=10000 \| \w+ \| \W*\d\S* ±", row)
            for cell in cells(row)[3:]
        ]
    advice = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    clear = sum("**" in cell for cell in found)
    assert f"with mapped positions, {len(found) - clear} of {len(found)} comparisons between rotations" in advice


FINDINGS = {  # rows of the table of findings: comparison, and decimals
    "images, learning rate 1e-3": ("image", 1),
    "images, learning rate 2e-3": ("image-2e-3", 1),
    "digits": ("digits", 1),
    "order of video segments": ("video", 1),
    "diffusion, held-out loss": ("diffusion", 3),
    "text, bits per byte": ("lm", 2),
}


@pytest.mark.parametrize("task", FINDINGS)
def test_findings_are_measured(task):
    """Each number in the table of findings is the mean of an encoding at the training size, with that attention."""
    comparison, digits = FINDINGS[task]
    rows = pd.read_csv(ROOT / "scripts" / "results" / f"ablate-{comparison}" / "results.csv", keep_default_na=False)
    rows = rows[(rows["size"] == rows["size"].iloc[0]) & rows.positions.isin(["extrapolated", "none"])]
    means = rows.astype({"value": float}).groupby(["attention", "encoding"]).value.mean()
    lines = (DOCS / "which-encoding.md").read_text(encoding="utf-8").splitlines()
    (texts,) = (cells(line)[1:] for line in lines if line.startswith(f"| {task} |"))
    for attention, text in zip(("softmax", "linear"), texts, strict=True):
        measured = {f"{mean:.{digits}f}" for mean in means.get(attention, [])}
        shown = re.findall(r"(?<![±\d] )\b\d+\.\d+", text)
        assert set(shown) <= measured, attention
        assert shown or attention == "linear"


def mean_loss_of_accuracy(comparison, encoding, attention, trained, size):
    """Return the points that an encoding loses at another size, with positions mapped onto the training grid."""
    rows = pd.read_csv(ROOT / "scripts" / "results" / f"ablate-{comparison}" / "results.csv", keep_default_na=False)
    rows = rows[(rows.positions == "rescaled") & (rows.encoding == encoding) & (rows.attention == attention)]
    means = rows.astype({"value": float}).groupby("size").value.mean()
    return round(means[trained] - means[size])


def test_losses_at_other_sizes_are_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    sizes = ("20x20", "40x40", "56x56", "28x40")
    images = [mean_loss_of_accuracy("image", "rotate", kind, "28x28", size)
              for kind in ("softmax", "linear") for size in sizes]  # fmt: skip
    assert f"rotation loses {min(images)} to {max(images)} points on images" in text
    rotate, sincos = (
        mean_loss_of_accuracy("video", name, "softmax", "8x48x48", "16x48x48") for name in ("rotate", "sincos")
    )
    claim = f"{rotate} points on clips with twice as many frames, and a sine-cosine table loses {sincos}."
    assert f"With softmax attention, rotation loses {claim}" in text
    rotate, sincos = (mean_loss_of_accuracy("digits", name, "softmax", "8x8", "16x16") for name in ("rotate", "sincos"))
    assert f"rotation loses {rotate} points and a sine-cosine table loses {sincos}." in text


def half_width(differences):
    """Return the half-width of the 95% confidence interval (Student's t) of three or five differences."""
    return {3: 4.303, 5: 2.776}[len(differences)] * differences.sem()


def test_differences_on_digits_at_other_sizes_are_measured():
    rows = pd.read_csv(ROOT / "scripts" / "results" / "ablate-digits" / "results.csv", keep_default_na=False)
    rows = rows[(rows.positions == "rescaled") & (rows.attention == "softmax")]
    values = rows.astype({"value": float}).set_index(["encoding", "size", "seed"]).value.sort_index()
    ahead = values["sincos"] - values["rotate"]
    twice, larger = ahead["16x16"], ahead.drop("8x8").groupby("size").mean()
    assert (twice > 0).all()
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    claim = f"the difference is {twice.mean():.0f} ± {half_width(twice):.0f} points."
    assert f"The table was ahead with all three seeds, but {claim}" in text
    assert (larger > 0).all()
    readme = " ".join(README.read_text(encoding="utf-8").split())
    assert "was ahead on average at larger sizes with mapped positions.*" in readme


def test_bits_per_byte_of_long_texts_are_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    rows = pd.read_csv(ROOT / "scripts" / "results" / "ablate-lm" / "results.csv", keep_default_na=False)
    means = rows.astype({"value": float}).groupby(["encoding", "positions", "size"]).value.mean()
    stretched, cosine = (
        "{:.2f}, {:.2f} and {:.2f}".format(*(means[name][size] for size in ("2048", "4096", "8192")))
        for name in (("rotate", "yarn"), ("cosine-softplus", "none"))
    )
    assert f"At 4, 8 and 16 times that length, stretched rotation reaches {stretched} bits per byte." in text
    assert f"Without stretching, cosine with softplus reaches {cosine}." in text
    longer = ["1024", "2048", "4096", "8192"]
    linear, unscaled = (means["rotate"][name][longer] for name in ("linear", "none"))
    assert (linear > unscaled).all()
    twice = f"{linear['1024']:.2f} instead of {unscaled['1024']:.2f} bits per byte at twice the length."
    assert f"makes rotation worse at every longer length: {twice}" in text


def test_differences_of_mixed_frequencies_at_other_sizes_are_measured():
    found = {}
    for task in ("image", "image-2e-3", "image-2e-3-qk-norm", "digits", "video"):
        text = (PAGES / f"ablate-{task}.md").read_text(encoding="utf-8").split("**Difference from rotate.")[1]
        rows = [cells(row) for row in text.split("Rescaled positions")[1].splitlines()]
        found[task] = [cell for row in rows if row[0] == "rotate-mixed" and "±" in row[2] for cell in row[3:]]
    high = found.pop("image-2e-3")
    assert all(cell.strip("*").startswith("-") for cell in high)
    assert any("**" in cell for cell in high)
    compared = [cell for row in found.values() for cell in row]
    same = sum("**" not in cell for cell in compared)
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    assert f"with mapped positions, {same} of {len(compared)} comparisons with axial frequencies" in text


def read_values(comparison, measure="value"):
    """Return the values at the training size, by encoding, attention and seed."""
    rows = pd.read_csv(ROOT / "scripts" / "results" / f"ablate-{comparison}" / "results.csv", keep_default_na=False)
    rows = rows[(rows["size"] == rows["size"].iloc[0]) & (rows.positions == "extrapolated")]
    return rows.astype({measure: float}).set_index(["encoding", "attention", "seed"])[measure]


def test_differences_of_bases_are_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    images, diffusion = map(read_values, ("image-bases", "diffusion-bases"))
    runs = [("rotate", "softmax"), ("rotate", "linear"), ("cosine-silu", "softmax")]
    pairs = [images[f"{name}:base=10000", kind] - images[f"{name}:base=100", kind] for name, kind in runs]
    worse = -pd.concat(pairs)
    better = diffusion["rotate:base=100", "softmax"] - diffusion["rotate:base=10000", "softmax"]
    assert f"base 10,000 was {worse.mean():.1f} ± {2.306 * worse.sem():.1f} points worse" in text
    lower = f"{better.mean():.3f} ± {4.303 * better.sem():.3f} lower than with base 100."
    assert f"the held-out loss with base 10,000 was {lower}" in text


def test_the_base_of_each_comparison_is_stated():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    older, named, current = set(), set(), set()
    for folder in (ROOT / "scripts" / "results").glob("ablate-*"):
        name = folder.name.removeprefix("ablate-")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        encodings = {each for names in config["settings"]["encodings"].values() for each in names}
        if "use base 100," in config.get("note", ""):
            older.add(name.split("-")[0])
        else:
            (named if all("base=" in each for each in encodings) else current).add(name)
    assert named == {"image-bases", "diffusion-bases", "digits-bases", "lm-frequencies"}
    assert current == {"lm", "recall", "diffusion-hybrids"}
    assert "Our runs on text, on recall and with mixed layers used this base." in text
    assert older == {"image", "video", "digits", "diffusion"}
    assert "our runs on images, video, digits and diffusion without mixed layers used base 100." in text


def test_rotation_and_cosine_of_recall_are_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    rows = pd.read_csv(ROOT / "scripts" / "results" / "ablate-recall" / "results.csv", keep_default_na=False)
    rows = rows[rows.question == "by place"].set_index(["encoding", "attention", "size", "seed"]).value.astype(float)
    ahead = rows["rotate"] - rows["cosine-silu"]
    half = 2.776 * ahead.groupby(["attention", "size"]).sem()
    mean = ahead.groupby(["attention", "size"]).mean()
    assert all(mean[memory, "8x4x4"] > half[memory, "8x4x4"] for memory in ("add", "delta", "softmax"))
    assert abs(mean["decay", "8x4x4"]) < half["decay", "8x4x4"]
    larger = f"{mean['decay', '8x8x8']:.0f} ± {half['decay', '8x8x8']:.0f}"
    assert f"rotation is ahead by {larger} points if the frames are larger" in text


def test_gains_of_memories_that_forget_are_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    rows = pd.read_csv(ROOT / "scripts" / "results" / "ablate-recall" / "results.csv", keep_default_na=False)
    rows = rows[(rows.question == "by key") & (rows.encoding == "rotate") & (rows["size"] == "64x4x4")]
    values = rows.set_index(["attention", "seed"]).value.astype(float)
    decay, delta = (values[name] - values["add"] for name in ("decay", "delta"))
    gain = f"With decay, accuracy at 64 frames is {decay.mean():.0f} ± {half_width(decay):.0f} points higher"
    assert f"{gain}, and with overwriting, it is {delta.mean():.0f} ± {half_width(delta):.0f} points higher." in text


def test_losses_without_mapped_positions_are_measured():
    """On larger images, encodings lose more than no positions. On smaller ones, softplus with softmax doesn't."""
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    rows = pd.read_csv(ROOT / "scripts" / "results" / "ablate-image" / "results.csv", keep_default_na=False)
    rows = rows[rows.positions == "extrapolated"]
    means = rows.astype({"value": float}).groupby(["attention", "encoding", "size"]).value.mean().unstack()
    loss = means.rsub(means["28x28"], axis=0).drop(columns="28x28")
    added = loss.sub(loss.xs("none", level="encoding"), level="attention").drop(["none", "learned"], level="encoding")
    assert (added.drop(columns="20x20") > 10).all(None)
    softplus = added.loc[["softmax"], "20x20"].filter(like="cosine-softplus")
    assert softplus.between(0, 2).all()
    assert (added["20x20"].drop(softplus.index) > 10).all()
    assert "On larger images, such a model loses more than a model without positions, unless it uses" in text
    assert "but cosine with softplus and softmax attention loses about as much as a model" in text


def test_the_lead_of_rotation_on_images_is_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    values = read_values("image")
    linear, softmax = (values["rotate", kind] - values["sincos", kind] for kind in ("linear", "softmax"))
    assert f"ahead of the table by {linear.mean():.1f} ± {half_width(linear):.1f} points with linear attention." in text
    assert softmax.mean() < half_width(softmax)
    assert f"it is ahead by {softmax.mean():.1f} ± {half_width(softmax):.1f} points, which is not a clear" in text


def test_softmax_layers_in_long_clips_are_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    rows = pd.read_csv(ROOT / "scripts" / "results" / "ablate-recall" / "results.csv", keep_default_na=False)
    rows = rows[rows.encoding == "rotate"].set_index(["question", "size", "attention", "seed"]).value.astype(float)
    place, key = rows["by place", "64x4x4"], rows["by key"]
    decay, delta = (place[name] - place[f"{name},{name},{name},softmax"] for name in ("decay", "delta"))
    assert abs(decay.mean()) < half_width(decay)
    worse = f"softmax layers make models with overwriting {delta.mean():.1f} ± {half_width(delta):.1f} points worse"
    assert f"the gain with decay is gone, and {worse}." in text
    ahead = (key[size]["delta,delta,delta,softmax"] - key[size]["decay"] for size in ("32x4x4", "64x4x4"))
    shorter, longer = (f"{each.mean():.1f} ± {half_width(each):.1f} points" for each in ahead)
    assert f"ahead of decay by {shorter} at 32 frames, and by {longer} at 64." in text


def test_the_gap_that_a_few_softmax_layers_close_is_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    loss = read_values("diffusion-hybrids")["rotate"]
    gap = loss["linear"] - loss["softmax"]
    closed = 100 * (loss["linear"] - loss["linear,linear,linear,softmax"]) / gap
    assert f"closes {closed.mean():.0f} ± {4.303 * closed.sem():.0f}% of the gap" in text


def test_notes_state_the_test_data():
    """Accuracies are multiples of one answer, so they show how many answers were tested."""
    stated = {"10,000 test images": 10_000, "42 test clips, each in all 24": 42 * 24, "512 test clips, each f": 512 * 2}
    found = set()
    for folder in (ROOT / "scripts" / "results").glob("ablate-*"):
        note = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("note", "")
        for part, answers in stated.items():
            if part in note:
                right = pd.read_csv(folder / "results.csv")["value"] * answers / 100
                assert (right - right.round()).abs().max() < 1e-6
                found.add(folder.name.removeprefix("ablate-"))
    images = {"image", "image-2e-3", "image-2e-3-qk-norm", "image-bases", "image-equal-time"}
    assert found == images | {"video", "video-arrow", "video-equal-time"}


def test_equal_time_and_qk_norm_are_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    more = []
    for task in ("diffusion", "image", "video"):
        steps = read_values(f"{task}-equal-time", "steps")["rotate"].groupby("attention").median()
        more.append(abs(100 * steps["linear"] / steps["softmax"] - 100))
    assert f"ran {more[0]:.0f}% more steps in the same time." in text
    assert f"ran {more[1]:.0f}% fewer steps on images, and {more[2]:.0f}% fewer on clips." in text
    low, high, normed = map(read_values, ("image", "image-2e-3", "image-2e-3-qk-norm"))
    moderate, plain, normed = (each["rotate", "softmax"].mean() for each in (low, high, normed))
    assert f"lowers the accuracy of rotation from {moderate:.1f}% to {plain:.1f}%" in text
    assert f"rotation reaches {normed:.1f}% at the higher rate" in text
    changes = (high - low).groupby(["encoding", "attention"]).mean().abs()
    encodings, attentions = (changes.index.get_level_values(level) for level in ("encoding", "attention"))
    stable = encodings.str.contains("silu|softplus") | ((encodings == "rotate") & (attentions == "linear"))
    assert stable.sum() == 7
    assert changes[stable].max() < 1
    means = low.groupby(["attention", "encoding"]).mean()
    relative = means[means.index.get_level_values("encoding").str.contains("rotate|cosine")].groupby("attention")
    assert (relative.max() - relative.min()).max() < moderate - plain


def test_gains_of_linear_attention_are_measured():
    text = " ".join((DOCS / "which-encoding.md").read_text(encoding="utf-8").split())
    rows: Any = pd.read_csv(ROOT / "scripts" / "results" / "linear-scaling.csv")
    rows = rows[(rows.backbone == "vit") & (rows["map"] == "rotate")]
    speeds = rows.drop_duplicates(["attention", "tokens"], keep="last").set_index(["attention", "tokens"]).tokens_per_s
    gains = {tokens: round(100 * speeds["linear", tokens] / speeds["softmax", tokens] - 100) for tokens in (256, 1024)}
    assert f"{gains[256]}% more tokens per second at 256 tokens, {gains[1024]}% more at 1,024" in text
    assert 1.9 < speeds["linear", 4096] / speeds["softmax", 4096] < 2.1


# --- generated pages -------------------------------------------------------------------------------------------------


def test_the_page_of_presets():
    files = sorted(path.name for path in (ROOT / "scripts" / "results" / "gallery").glob("presets-[0-9].png"))
    page = (PAGES / "presets.md").read_text(encoding="utf-8")
    assert page == gallery.render(files), "run python -m scripts.visualize.gallery"
    for name in lrpe_md.list_presets():
        assert f"\n### {name}\n" in gallery.render(files)


def test_pictures_of_presets(tmp_path):
    gallery.draw(["rope_vit_axial", "wan", "pope"], tmp_path / "some.png")
    assert 10_000 < (tmp_path / "some.png").stat().st_size < 300_000
    for name in ("rope_vit_axial", "wan", "circle_rope", "mhrope"):
        found = gallery.over_grid(lrpe_md.preset(name, num_heads=8 if name == "mhrope" else None))
        assert found.values[found.token] == found.values.max() == pytest.approx(1), name
        assert found.values.min() < 0.9, name  # not flat


def test_no_picture_marks_a_singular_point():
    """The similarity of circle_rope differs on two sides of its centre, and is smooth at the token."""
    found = gallery.over_grid(lrpe_md.preset("circle_rope"))
    row, column = found.token
    assert found.values[row, column - 1 : column + 2].min() > 0.95


def test_presets_are_sorted():
    names = re.findall(r"^\| \[`(\w+)`\]", (PAGES / "presets.md").read_text(encoding="utf-8"), re.M)
    assert names == sorted(lrpe_md.list_presets()), "run python -m scripts.visualize.gallery"


def test_the_tables_of_schemes_list_every_preset():
    from original_noise import measured_presets

    text = (DOCS / "schemes.md").read_text(encoding="utf-8")
    published, errors = (
        text.split(f"# {title}\n")[1] for title in ("Published schemes", "Rounding error of the originals")
    )
    rows = re.findall(r"^\| .* \| (`.*) \|$", published.split("\n\n")[0], re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    missing = sorted(set(lrpe_md.list_presets()) - set(named))
    assert sorted(named) == sorted(lrpe_md.list_presets()), f"add {missing} to the published schemes in docs/schemes.md"
    measured = re.findall(r"^\| `(\w+)` \|", errors, re.M)
    assert measured == measured_presets(), "list the rounding errors in docs/schemes.md in the order of SCHEMES"


def test_plots_have_a_copy_for_dark_pages():
    linked = {target for path in ALL for target in re.findall(r"!\[[^]]*\]\(([^)#]+\.(?:png|svg))", path.read_text())}
    linked = {target for target in linked if "complete-runs" not in target}  # samples of models, like photographs
    found = {path.name for place in (ROOT / "scripts", DOCS) for path in place.rglob("*-dark.*")}
    names = {Path(target).name for target in linked} - {"samples.png"}  # photographs don't change
    assert {f"{Path(name).stem}-dark{Path(name).suffix}" for name in names} <= found


def test_generated_pages_name_their_command():
    for path in PAGES.glob("*.md"):
        assert re.match(r"# .*\n\n<!-- Written by `(lrpe-md|python -m) [\w. ]+`", path.read_text(encoding="utf-8")), (
            path
        )


def test_every_page_is_linked():
    linked = {
        (path.parent / target).resolve()
        for path in ALL for target in re.findall(r"\]\(([^)#\s]+\.md)", path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert {path for path in DOCS.rglob("*.md") if path.resolve() not in linked} == set()


def test_the_page_about_performance_lists_every_benchmark():
    from lrpe_md.scripts.bench.app import COMMANDS

    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    listed = text.split("`lrpe-md bench --help` lists the other benchmarks: ")[1].split(".")[0]
    assert {*re.findall(r"`([\w-]+)`", listed), "my-shapes", "compare", "report"} == set(COMMANDS)


def test_tables_are_at_most_as_fast_as_claimed():
    files = [ROOT / f"scripts/results/benchmark-{name}.csv" for name in ("vit224", "img64", "video", "text")]
    rows = pd.concat([pd.read_csv(file) for file in files])
    rows = rows[rows.peer.isin(["lrpe-md", "torch.compile, tables"]) & rows.variant.isna()]
    times = rows.pivot_table(index=["workload", "op", "omega", "mode"], columns="peer", values="p50").dropna()
    speed = times["lrpe-md"] / times["torch.compile, tables"]
    assert speed.max() < 1.02
    assert (speed > 1).mean() < 0.5
    text = " ".join((DOCS / "performance.md").read_text(encoding="utf-8").split())
    assert "reads precomputed tables is at most 2% faster, and slower in most cases." in text


# --- the reference ---------------------------------------------------------------------------------------------------


def test_names_on_the_contributors_pages_exist():
    code = {
        path: path.read_text(encoding="utf-8")
        for place in ("lrpe_md", "models", "scripts", "tests")
        for path in (ROOT / place).rglob("*.py")
    }
    known = set(re.findall(r"\w+", "".join(code.values()))) | {path.stem for path in code}
    for page in (DOCS / "architecture.md", ROOT / "CONTRIBUTING.md"):
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        names = {name for span in re.findall(r"`([^`]+)`", text) for name in re.findall(r"[A-Za-z_]*_[A-Za-z_]+", span)}
        names = {name.removeprefix("_lrpe_") for name in names}  # a prefix that copies of functions get
        assert sorted(names - known - {"test_NAME"}) == [], page


def test_every_activation_is_listed():
    features = (DOCS / "features.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| activations before the map \| (.*) \|$", features, re.M)
    assert tuple(each.split()[0] for each in row.split(", ")) == tuple(ACTIVATIONS)
    (argument,) = re.findall(r"^ *act: (.*?)^ *dim: ", lrpe_md.cosine.__doc__ or "", re.M | re.S)
    assert tuple(re.findall(r'"(\w+)"', argument)) == tuple(ACTIVATIONS)


def test_every_axis_map_is_listed():
    page = (DOCS / "schemes.md").read_text(encoding="utf-8")
    for name in get_args(AxisMapName):
        assert f'"{name}"' in page
        assert f'- ``"{name}"``: ' in (lrpe_md.axial_omega.__doc__ or "")


def test_every_exported_name_is_in_the_reference():
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    named = {line.split(".")[-1] for line in re.findall(r"^::: (.*)$", text, re.M)}
    exported = {*lrpe_md.__all__, "adapt", *integrations._PLACES}
    assert {re.sub(r"(_cache)?(_fwd|_bwd)?_(torch|triton)$", "", name) for name in exported} - named == set()
    for folder in ("positions", "frequencies", "modules", "presets"):
        text = (ROOT / "lrpe_md" / folder / "__init__.py").read_text(encoding="utf-8")
        names = set(re.findall(r"import (\w+) as \w+$", text, re.M))
        missing = {name for name in names - named if not name.isupper()}
        assert missing <= {"AxisMap", "AxisOrder", "PerAxis", "Rules", "Segment", "Scaling"}, missing


def test_the_menu_has_every_page():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages | {"changelog.md", "contributing.md"} == set(re.findall(r": ([\w/-]+\.md)$", menu, re.M))
