"""Where a run comes from that goes on from a step of another one. Stands in its ``run.json`` and never changes."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_omni_core.errors import StoreError
from verl_omni_core.store.places import RUN

FIELD = "lineage"


@dataclass(frozen=True)
class Lineage:
    """The parent of a fork, and what the fork took over or changed."""

    run_id: str
    """The parent's name when the fork was made."""
    uuid: str
    """The parent's: another run under that name has another one."""
    step: int
    """The fork's own steps begin after it."""
    manifests: Mapping[str, str]
    """``<step>/<stage>`` of what was taken over, to the sha256 of the parent's manifest."""
    settings: tuple[tuple[str, Any, Any], ...] = ()
    """Name, the parent's value and the fork's own of each setting that differs, but for name and place of the run."""

    def __str__(self) -> str:
        return f"{self.run_id}@{self.step}"

    def to_json(self) -> dict[str, Any]:
        """Return the lineage as JSON-like values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> "Lineage | None":
        """Return the lineage that :meth:`to_json` wrote; none for none.

        Raises:
            StoreError: it is anything else.
        """
        if value is None:
            return None
        try:
            values = {field.name: value[field.name] for field in dataclasses.fields(cls)}
            settings = tuple((str(name), old, new) for name, old, new in values["settings"])
            lineage = cls(**{**values, "step": int(values["step"]), "settings": settings})
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{FIELD} of {RUN} is damaged ({error!r}); restore the file from a copy") from error
        return lineage


def base_step(root: Path) -> int:
    """Return the step of the parent that the run in ``root`` goes on from; 0 for a run without a parent.

    Raises:
        StoreError: what it says about its parent is damaged.
    """
    try:
        made = json.loads((root / RUN).read_bytes())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise StoreError(f"{root / RUN} is damaged ({error}); restore it from a copy") from error
    lineage = Lineage.from_json(made.get(FIELD)) if isinstance(made, dict) else None
    return 0 if lineage is None else lineage.step
