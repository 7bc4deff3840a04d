"""Package the library as a pure-Python ("noarch") kernel for the Kernel Hub (huggingface.co/docs/kernels).

    python -m scripts.kernel_hub --out build/kernel

This writes a kernel-builder project and its build:

    build.toml, flake.nix, CARD.md   kernel-builder's configuration and the model card
    torch-ext/lrpe_md/               the library, with relative imports only
    build/torch-cuda/, ...           one variant per backend: the library, its own _ops.py, and metadata.json

Each variant registers its operators in a namespace that contains a hash of the variant's content. A kernel can
therefore run next to an installed lrpe_md and to other versions of the kernel. Adapters, models and programs are left
out, because a kernel may only import torch. To try the kernel, call:

    kernels.get_local_kernel(Path("build/kernel/build"))

To publish the kernel, log in with ``hf auth login`` as a member of the organisation in ``--repo-id`` who may create
kernels, and run:

    kernel-builder upload build/kernel

kernel-builder (https://github.com/huggingface/kernels) is a separate program that needs Nix to build, but not to
upload. To build the variants with kernel-builder, put the output folder into a git repository and run ``kernel-builder
build-and-upload``.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

NAME = "lrpe-md"
PACKAGE = Path(__file__).resolve().parents[1] / "lrpe_md"
EXCLUDED = ("_ops.py", "integrations", "models", "scripts", "testing.py", "__pycache__")
BACKENDS = ("cpu", "cuda", "rocm")

CARD = """\
---
library_name: kernels
license: mit
---

# lrpe-md

Rotary (RoPE) and cosine (LRPE) positional encodings on any number of axes, and linear attention with them: fused Triton
kernels, forward and backward, exact at any position, for fixed and learned frequencies.

```python
import torch
from kernels import get_kernel

lrpe_md = get_kernel("{repo_id}", version={version}, trust_remote_code=True)
q, k = torch.randn(2, 1, 8, 197, 64, device="cuda").unbind()  # (B, H, N, D): a class token, 14×14 patches
rope = lrpe_md.RotateMd(64).to("cuda")
q, k = rope(q, k, positions=lrpe_md.Grid((14, 14), prefix=1))
```

Without a GPU or without Triton, a PyTorch reference implementation runs instead.
"""

FLAKE = """\
{
  description = "Relative positions on any number of axes";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder, ... }: kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""

OPS = '''\
"""Access to the registered operators, whose namespace is a hash of this build."""

from typing import Any

import torch

__all__ = ["add_op_namespace_prefix", "ops"]

ops: Any = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    """Qualify an operator name: ``forward`` → ``{id}::forward``."""
    return f"{id}::{{op_name}}"
'''


class KernelError(typer.BadParameter):
    """Raised if the library's sources or the output folder can't be used for a kernel."""


def read_sources() -> dict[str, str]:
    """Return the kernel's source files by path, without _ops.py."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in EXCLUDED]
    found = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    found["__init__.py"] = close_package(found["__init__.py"])
    for path, source in found.items():
        check_imports(path, source)
    return found


def close_package(source: str) -> str:
    """Return the source of ``__init__.py`` without the names of adapters."""
    without = re.sub(r"^_INTEGRATIONS = .*$", "_INTEGRATIONS = ()", source, count=1, flags=re.MULTILINE)
    without = re.sub(r"^    from \.integrations import .*\n", "", without, flags=re.MULTILINE)
    if without == source:
        raise KernelError("__init__.py: expected a line _INTEGRATIONS = ..., which lists the adapters to leave out")
    return without


def check_imports(path: str, source: str) -> None:
    """Check that all imports from this package are relative and refer to modules of the kernel.

    The Hub imports a kernel under a different package name.

    Raises:
        KernelError: if an import is absolute or refers to an excluded module.
    """
    depth = path.count("/")
    for node in ast.walk(ast.parse(source)):
        absolute = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            absolute = [] if node.level else [node.module or ""]
            place = (*path.split("/")[: depth + 1 - node.level], *(node.module or "").split("."))
            inner = [part for part in place if part] or [alias.name for alias in node.names]
            if node.level > depth + 1 or (node.level and {inner[0], f"{inner[0]}.py"} & {*EXCLUDED} - {"_ops.py"}):
                raise KernelError(f"{path}: must not import an excluded module, got {ast.unparse(node)!r}")
        if any(name.split(".")[0] == "lrpe_md" for name in absolute):
            raise KernelError(f"{path}: must use relative imports of lrpe_md, got {ast.unparse(node)!r}")


def read_version(sources: dict[str, str]) -> int:
    """Return the library's major version, which is also the kernel's version."""
    found = re.search(r'^__version__ = "(\d+)\.', sources["__init__.py"], flags=re.MULTILINE)
    if not found:
        raise KernelError('__init__.py: expected a line __version__ = "...", found none')
    return int(found[1])


def write_files(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def write_variant(folder: Path, sources: dict[str, str], backend: str) -> str:
    """Write the build for a backend. Return the build's identifier, which is part of the operators' namespace."""
    digest = hashlib.sha256("\0".join(f"{path}\0{text}" for path, text in sorted(sources.items())).encode())
    identifier = f"_lrpe_md_{backend}_{digest.hexdigest()[:7]}"
    files = {**sources, "_ops.py": OPS.format(id=identifier)}
    hashes = {path: hashlib.sha256(text.encode()).digest() for path, text in sorted(files.items())}
    metadata = {
        "name": NAME,
        "id": identifier,
        "version": read_version(sources),
        "license": "mit",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {p: base64.b64encode(h).decode() for p, h in hashes.items()}},
    }
    write_files(folder, {**files, "metadata.json": json.dumps(metadata, indent=2)})
    return identifier


def write_project(folder: Path, repo_id: str) -> list[str]:
    """Write the project with all variants, and return the variants' identifiers."""
    sources = read_sources()
    version = read_version(sources)
    quoted = ", ".join(f'"{backend}"' for backend in BACKENDS)
    config = (
        f'[general]\nname = "{NAME}"\nversion = {version}\nedition = 5\nlicense = "mit"\nbackends = [{quoted}]\n\n'
        f'[general.hub]\nrepo-id = "{repo_id}"\n\n[torch-noarch]\n'
    )
    card = CARD.format(repo_id=repo_id, version=version)
    write_files(folder, {"build.toml": config, "flake.nix": FLAKE, "CARD.md": card, "build/CARD.md": card})
    write_files(folder / "torch-ext" / "lrpe_md", sources)
    return [write_variant(folder / "build" / f"torch-{backend}", sources, backend) for backend in BACKENDS]


def replace_folder(out: Path, made: Path) -> None:
    """Move the built project to ``out``, replacing an earlier kernel there.

    Raises:
        KernelError: if ``out`` contains something else.
    """
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        config = out / "build.toml"
        if not config.is_file() or f'name = "{NAME}"' not in config.read_text(encoding="utf-8"):
            raise KernelError(
                f"--out {out}: expected a new folder, or one that contains a kernel written by this command; choose "
                "another folder"
            )
    if out.exists():
        shutil.rmtree(out)
    made.rename(out)


def main(
    out: Annotated[Path, typer.Option(help="Output folder. A kernel in it is overwritten.")],
    repo_id: Annotated[str, typer.Option(help="Hub repository, as ORGANISATION/NAME.")] = "lrpe-md/lrpe-md",
) -> None:
    """Write the library as a Kernel Hub project, including the builds."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise typer.BadParameter(f"--repo-id: expected ORGANISATION/NAME, got {repo_id!r}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".kernel-") as place:
            made = Path(place) / "kernel"
            names = write_project(made, repo_id)
            replace_folder(out, made)
    except OSError as error:
        raise KernelError(f"--out {out} can't be written ({error.strerror}); choose another folder") from error
    typer.echo(f"{out}: {', '.join(names)}\nTo publish it, run: kernel-builder upload {out}")


if __name__ == "__main__":
    typer.run(main)
