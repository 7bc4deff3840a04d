"""Choose the samples of each step. The choice only depends on seed and step, so a run can resume at any step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
import typer
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset

Chosen: TypeAlias = tuple[np.ndarray, np.ndarray]  # indices and draws, both int64 (B,)
Steps: TypeAlias = Callable[[int], Iterator[Chosen]]  # yields the samples of a step and of all later steps


class DataError(typer.BadParameter):
    """Error for a sample that can't be read during training. The run saves a checkpoint and stops."""


def shuffle(num: int, batch: int, seed: int, start: int = 0) -> Iterator[Chosen]:
    """Yield endless batches of shuffled indices, starting at step ``start`` without drawing earlier batches.

    Every epoch is a permutation of ``num`` samples. An incomplete last batch is dropped.

    Yields:
        indices and draws, each int64 (batch,). A draw is a random number from 0 to 2^63 - 1 that determines the label
        or the augmentation of a sample, either directly or as a seed.
    """
    per_epoch = steps_per_epoch(num, batch)
    of = -1
    permutation = draws = np.empty(0, np.int64)
    for step in itertools.count(start):
        epoch, i = divmod(step, per_epoch)
        if epoch != of:
            generator, of = np.random.default_rng((seed, epoch)), epoch
            permutation, draws = generator.permutation(num), generator.integers(2**63, size=num)
        yield permutation[i * batch : (i + 1) * batch], draws[i * batch : (i + 1) * batch]


def shuffle_groups(groups: Sequence[np.ndarray], batch: int, seed: int, start: int = 0) -> Iterator[Chosen]:
    """Yield endless batches of shuffled indices, starting at step ``start``. Each batch comes from one group.

    Every sample is drawn equally often, regardless of the size of its group. A group with fewer samples than a batch
    does not provide a batch in every epoch.

    Args:
        groups: sample indices of each group.

    Yields:
        indices and draws; see :func:`shuffle`.
    """
    sizes = np.array([len(group) for group in groups])
    if sizes.sum() < batch:
        raise typer.BadParameter(
            f"--batch {batch}: expected at most {sizes.sum()}, the number of samples; use a smaller batch, or add data"
        )  # fmt: skip

    @lru_cache(maxsize=2 * len(groups))
    def permute(number: int, turn: int) -> np.ndarray:
        return groups[number][np.random.default_rng((seed, 1, number, turn)).permutation(sizes[number])]

    def take(number: int, first: int) -> np.ndarray:
        """Concatenate the permutations of a group, and return ``batch`` elements from ``first`` on."""
        turn, offset = divmod(first, int(sizes[number]))
        parts = [permute(number, turn)[offset:]]
        while sum(map(len, parts)) < batch:
            turn += 1
            parts.append(permute(number, turn))
        return np.concatenate(parts)[:batch]

    epoch = start * batch // int(sizes.sum())  # a lower bound on the epoch of this step
    while (np.multiply(epoch + 1, sizes) // batch).sum() <= start:
        epoch += 1
    step = int((epoch * sizes // batch).sum())
    for number in itertools.count(epoch):
        made, until = number * sizes // batch, (number + 1) * sizes // batch
        for group in np.random.default_rng((seed, 0, number)).permutation(
            np.repeat(np.arange(len(sizes)), until - made)
        ):
            if step >= start:
                draws = np.random.default_rng((seed, 2, step)).integers(2**63, size=batch)
                yield take(int(group), int(made[group]) * batch), draws
            made[group] += 1
            step += 1


def order_groups(groups: list[np.ndarray], batch: int, seed: int) -> Steps:
    """Return the steps of a training run. All samples in a batch come from one group."""
    if len(groups) == 1:
        return partial(shuffle, len(groups[0]), batch, seed)
    return partial(shuffle_groups, groups, batch, seed)


def steps_per_epoch(num: int, batch: int) -> int:
    if num < batch:
        raise typer.BadParameter(
            f"--batch {batch}: expected at most {num}, the number of samples; use a smaller batch, or add data"
        )
    return num // batch


def divide(steps: Iterator[Chosen], accumulate: int = 1, rank: int = 0, world: int = 1) -> Iterator[Chosen]:
    """Yield the micro-batches of one process.

    The samples and draws of a step do not depend on the number of processes and micro-batches.
    """
    for chosen in steps:
        micro = len(chosen[0]) // (accumulate * world)
        for part in range(accumulate):
            first = (part * world + rank) * micro
            yield chosen[0][first : first + micro], chosen[1][first : first + micro]


def prepare_ahead(batch: Callable[..., Any], chosen: Iterator[tuple[Any, ...]], workers: int) -> Iterator[Any]:
    """Yield batch(*each) for each element of ``chosen``, in order. Threads compute batches ahead of time."""
    if not workers:
        yield from itertools.starmap(batch, chosen)
        return
    with ThreadPoolExecutor(workers) as pool:
        made = deque(pool.submit(batch, *each) for each in itertools.islice(chosen, 2 * workers))
        while made:
            yield made.popleft().result()
            made.extend(pool.submit(batch, *each) for each in itertools.islice(chosen, 1))


class _Batches(Dataset):  # pyright: ignore[reportMissingTypeArgument]
    """Dataset of batches for chosen samples. Errors are returned instead of raised, to preserve their text."""

    def __init__(self, batch: Callable[..., Any]) -> None:
        self.batch = batch

    def __getitem__(self, chosen: tuple[Any, ...]) -> Any:
        try:
            return self.batch(*chosen)
        except DataError as error:
            return error


def prepare_in_processes(
    batch: Callable[..., Any], chosen: Iterator[tuple[Any, ...]], workers: int, device: torch.device
) -> Iterator[Any]:
    """Compute batch(*each) for each element of ``chosen`` in worker processes, and yield the batches on the device."""
    sampler: Any = chosen
    loader = DataLoader(
        _Batches(batch), batch_size=None, sampler=sampler, num_workers=workers, pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # keeps DataLoader from using the global generator
    )  # fmt: skip
    for made in loader:
        if isinstance(made, DataError):
            raise made
        yield send_to_device(made, device, non_blocking=True)


def derive_seed(*numbers: int) -> int:
    """Combine several numbers into a seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
