"""Records of the machine, versions and commit with which a measurement was made."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .devices import gpu_name


def git_commit(digits: int = 40) -> str:
    """Return the checkout's commit, followed by "+" if files have changed, or "" if there is no git history."""
    command = ["git", "describe", "--always", f"--abbrev={digits}", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip()


def versions(*names: str) -> dict[str, str]:
    """Return the versions of packages by name, with "" for packages that are not installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def measured_on(device: torch.device, commit: str | None) -> dict[str, str]:
    """Return the columns that describe where a row was measured. ``commit`` overrides git's commit."""
    found = versions("torch", "triton", "timm").items()
    return {
        "gpu": gpu_name(device) or f"none ({platform.machine()} CPU)",
        "versions": ", ".join(f"{name} {number}" if number else f"no {name}" for name, number in found),
        "commit": git_commit() if commit is None else commit,
    }


def environment(device: str, *packages: str) -> dict[str, Any]:
    """Return the machine, versions and commit. Host names and paths are left out."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "gpu": gpu_name(torch.device(device)),
        "commit": git_commit() or None,
        "python": platform.python_version(),
        **versions(*packages),
    }


def describe_environments(environments: list[dict[str, Any]]) -> str:
    """Summarise the machines, versions and commits from several environments for a report."""
    where = dict.fromkeys(f"{found['gpu'] or found['cpu']}, torch {found['torch']}" for found in environments)
    return f"{' and '.join(where)}, {name_commits(shorten(found['commit'] or 'unknown') for found in environments)}"


def shorten(commit: str) -> str:
    """Return at most 12 digits of a commit from :func:`git_commit`, and say if files had changed."""
    digits, changed, _ = commit.partition("+")
    return f"{digits[:12]} with local changes" if changed else digits[:12]


def name_commits(commits: Iterable[str]) -> str:
    """Return a string such as "commit a" or "commits a, b and c", without duplicates."""
    *others, last = dict.fromkeys(commits)
    return f"commits {', '.join(others)} and {last}" if others else f"commit {last}"
