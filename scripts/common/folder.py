"""Output folders of runs. Writes are atomic, and each folder has one configuration, so runs can resume."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Any, TypeVar

import typer

try:
    import fcntl
except ImportError:  # not available on Windows
    fcntl = None

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def require_checkout(option: str) -> None:
    """Raise an error outside of a checkout, because results or pages would be written to site-packages."""
    if not (ROOT / "pyproject.toml").is_file():
        raise typer.BadParameter(f"{option}: expected a folder, got none; only a checkout contains results")


def shown(path: Path) -> str:
    """Format a path for help texts. A path inside the repository is shown relative to the root."""
    return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()


def is_hidden(path: PurePath) -> bool:
    """Return whether a relative path has a hidden part, such as .ipynb_checkpoints or macOS's ._NAME."""
    return any(part.startswith(".") for part in path.parts)


def list_visible(folder: Path, pattern: str = "**/*") -> list[Path]:
    """Return the paths in a folder that match a pattern, sorted and without hidden paths."""
    return sorted(path for path in folder.glob(pattern) if not is_hidden(path.relative_to(folder)))


class SaveError(OSError):
    """Error for a file that can't be written. The file's previous content is intact."""


def save_whole(path: Path, save: Callable[[Path], Any]) -> None:
    """Write a file atomically, so that a killed process never leaves an incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode
        save(part)
        part.chmod(mode)  # safetensors writes files that only their owner can read
        os.replace(part, path)
    except OSError as error:
        raise SaveError(f"{path} can't be written ({error})") from error
    finally:
        part.unlink(missing_ok=True)


def make_folder(out: Path) -> None:
    """Create the folder of --out if it is missing, and check that files can be written to it.

    Raises:
        typer.BadParameter: if the folder can't be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out, suffix=".part"):  # a suffix that readers ignore
            pass
    except OSError as error:
        raise typer.BadParameter(f"--out {out} can't be written ({error.strerror}); choose another folder") from error


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Lock a folder while this program writes to it, and delete incomplete files that killed programs left behind.

    Raises:
        typer.BadParameter: if the folder can't be written, or another program has locked it.
    """
    make_folder(out)
    with ExitStack() as stack:
        if fcntl is not None:  # not available on Windows
            handle = os.open(out, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise typer.BadParameter(
                    f"--out {out}: another run is writing there; wait until it ends, or choose another folder"
                ) from error
            except OSError:  # the file system has no locks
                pass
        for part in out.glob("*.part"):
            delete(part)
        yield


def delete(path: Path) -> None:
    """Delete a file or folder, including its content."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``out`` when the block ends, or deleted if the block fails.

    Raises:
        typer.BadParameter: if ``out`` has content or can't be written, or another program is filling it.
        SaveError: if the disk is full.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise typer.BadParameter(f"--out {out}: expected a new or empty folder; choose another one")
    part = out.with_name(f"{out.name}.part")
    with claim(part):
        for leftover in part.iterdir():
            delete(leftover)
        try:
            yield part
            os.replace(part, out)
        except OSError as error:
            raise SaveError(f"--out {out} can't be written ({error})") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def unused_path(path: Path) -> Path:
    """Return the first path of NAME.png, NAME-2.png, NAME-3.png, ... that does not exist."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_stem(f"{path.stem}-{number}")
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file that one of the programs wrote.

    Raises:
        typer.BadParameter: if the file can't be read, or is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise typer.BadParameter(f"{path} can't be read ({reason}); delete it, or choose another folder") from error


def write(path: Path, text: str) -> None:
    save_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def from_root(folder: Path) -> Path:
    """Return a folder's path: relative to the repository root for a folder inside it, absolute for any other folder."""
    shown = folder.resolve()
    return shown.relative_to(ROOT) if shown.is_relative_to(ROOT) else shown


def parse_shard(shard: str) -> tuple[int, int]:
    number, _, count = shard.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise typer.BadParameter(f"--shard: expected i/n with i from 0 to n - 1, got {shard!r}")
    return int(number), int(count)


def missing(jobs: dict[Path, T], shard: tuple[int, int] = (0, 1)) -> dict[Path, T]:
    """Return the jobs in a shard (every n-th job, starting with the i-th) whose file does not exist yet."""
    number, count = shard
    return {file: job for file, job in list(jobs.items())[number::count] if not file.exists()}


def flat(nested: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries, such as {"a": {"b": 1}} to {"a.b": 1}."""
    if not isinstance(nested, dict):
        return {name: nested}
    return {k: v for key, value in nested.items() for k, v in flat(value, f"{name}.{key}".strip(".")).items()}


def show_value(value: Any) -> str:
    """Format an option's value as the user would type it."""
    if isinstance(value, list):
        return " ".join(map(show_value, value))
    return repr(value) if value == "" else str(value)


def as_option(name: str) -> str:
    """Return the ``ablate`` option for a setting, such as "--set size" for "training.size"."""
    if name in ("task", "data"):
        return name.upper()
    part, _, option = name.partition(".")
    return f"--set {option}" if part == "training" else f"--{name}"


def open_folder(out: Path, settings: dict[str, Any], here: dict[str, Any], extended: Collection[str] = ()) -> None:
    """Write config.json, or check that the folder's config.json contains the same settings.

    ``extended`` names settings that may differ because the caller merged them with those in the folder.
    """
    path = out / "config.json"
    wanted = json.loads(json.dumps(settings))
    config: dict[str, Any] = {}
    environments: list[Any] = []
    if path.exists():
        config = read_json(path)
        found, environments = config["settings"], config["environments"]
        found, now = (flat({k: v for k, v in each.items() if k not in extended}) for each in (found, wanted))
        differ = [
            f"{as_option(k)}: {show_value(found.get(k))} in the folder, {show_value(now.get(k))} requested"
            for k in {**found, **now}
            if found.get(k) != now.get(k)
        ]
        if differ:
            text = "; ".join(differ)
            raise typer.BadParameter(
                f"--out {out} contains runs with different settings ({text}); pass the same settings, "
                "or choose another folder"
            )
    elif out.is_dir() and any(file.suffix != ".part" for file in out.iterdir()):
        raise typer.BadParameter(f"--out {out} is not empty and has no config.json; choose an empty or new folder")
    environments += [] if here in environments else [here]
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_config(path, {**config, "settings": wanted, "environments": environments})
    except OSError as error:
        reason = error.strerror or error
        raise typer.BadParameter(f"--out {out} can't be written ({reason}); choose another folder") from error


def write_config(path: Path, config: dict[str, Any]) -> None:
    write(path, json.dumps(config, indent=2) + "\n")
