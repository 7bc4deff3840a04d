"""The file history.csv, which contains the losses of a training run. Each log entry adds a row."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from ..common.folder import SaveError, save_whole

HISTORY = "history.csv"


class HistoryFile:
    """A CSV file that grows with the history of a training run.

    The checkpoint also stores the history. When a killed run resumes, :meth:`write` removes the rows that were added
    after the last checkpoint.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []

    def write(self, history: list[dict[str, Any]]) -> None:
        """Replace the file's content, or delete the file if there are no rows."""
        self.columns = list(dict.fromkeys(name for row in history for name in row))
        if history:
            save_whole(self.path, lambda part: self._put(part, "w", history))
        else:
            self.path.unlink(missing_ok=True)

    def add(self, history: list[dict[str, Any]]) -> None:
        """Append the last row of a history, or replace the file if the row has new columns."""
        if not self.columns or history[-1].keys() - set(self.columns):
            self.write(history)
            return
        try:
            self._put(self.path, "a", history[-1:])
        except OSError as error:
            raise SaveError(f"{self.path} can't be written ({error})") from error

    def _put(self, path: Path, mode: str, rows: list[dict[str, Any]]) -> None:
        with path.open(mode, newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, self.columns)
            if mode == "w":
                table.writeheader()
            table.writerows(rows)
