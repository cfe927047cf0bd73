"""Defines the report of `apply()`: a row per patch with its status and the reason."""

from __future__ import annotations

from .rows import PROBLEMS, Row

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Report:
    """Holds one row per known patch, in order of id.

    Example:
        for row in megatron_idempotent.apply():
            print(row.id, row.status, row.reason)
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {row.id: row for row in rows}

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, patch_id: str) -> Row:
        row = self._rows.get(patch_id)
        if row is None:
            from .settings import unknown_id

            if not isinstance(patch_id, str):
                raise TypeError(
                    f"a report has its rows by patch id (str), got {patch_id!r}: loop over it for "
                    "its rows in order"
                )
            raise KeyError(unknown_id(patch_id, "report[]", tuple(self._rows)))
        return row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self._rows == other._rows

    __hash__ = None  # type: ignore[assignment]  # rows are compared by value

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for row in self:
            counts[row.status] = counts.get(row.status, 0) + 1
        inner = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        return f"<Report {inner}>"

    def __str__(self) -> str:
        from .overview import overview
        from .table import terminal_width

        return overview(self, self.incomplete, terminal_width())

    @property
    def problems(self) -> tuple[Row, ...]:
        """Rows with the status failed, drifted or conflict."""
        return tuple(row for row in self if row.status in PROBLEMS)

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Sentences about groups of patches of which a member is refused or excluded.

        Each has the missing patch, the effect, and the remedy.
        """
        from .catalog import patches
        from .record import incomplete

        return tuple(incomplete(self, patches()))

    def to_json(self) -> str:
        """Return the rows as a JSON array of objects with the fields of `Row`."""
        import json

        return json.dumps([row.as_dict() for row in self], indent=2)
