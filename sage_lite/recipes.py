"""One table: a method is its differences from a common base in advantage, loss and sampling."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from sage_lite.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """A training method. The defaults are the common base; a row of RECIPES says only what differs from it.

    advantage, advantage_params: name and parameters for `sage_lite.advantages.get`. normalization, kind, clip_low,
    clip_high: as in `sage_lite.losses.policy_loss`. drop_dead_groups: groups whose rewards are all equal leave the
    batch, its token count included (the base keeps them in the count). source: where the method is defined.
    """

    advantage: str
    advantage_params: dict[str, Any] = field(default_factory=dict)
    normalization: str = "token"
    kind: str = "clip"
    clip_low: float = 0.20
    clip_high: float = 0.28
    drop_dead_groups: bool = False
    source: str = ""

    def differences(self) -> dict[str, Any]:
        """The fields in which this row differs from the base, by name."""
        base = Recipe(advantage="")
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(base, f.name)}


RECIPES: dict[str, Recipe] = {
    # name          advantage       what differs from the base
    "reinforce": Recipe("reinforce", source="Williams 1992"),
    "rloo":      Recipe("rloo", source="arXiv 2402.14740"),
    "grpo":      Recipe("grpo", source="arXiv 2402.03300, eq. 3 for the advantage; loss of the base"),
    "dr_grpo":   Recipe("dr_grpo", normalization="constant", clip_high=0.20, source="arXiv 2503.20783"),
    "dapo":      Recipe("grpo", drop_dead_groups=True, source="arXiv 2503.14476"),
    "cispo":     Recipe("grpo", kind="cispo", clip_low=1.0, clip_high=4.0, source="arXiv 2506.13585"),
    "sage":      Recipe("sage", {"tau": 0.1}, source="arXiv 2608.09271"),
    "maxrl":     Recipe("maxrl", source="mean-normalised rewards; the tau -> 0 limit of sage"),
    "sign":      Recipe("sign", source="2r - 1, REINFORCE with baseline 1/2, scaled"),
    "f_grpo":    Recipe("focal_grpo", {"gamma": 1.0}, source="grpo times (1 - k/M)^gamma"),
}


def recipe(name: str) -> Recipe:
    """The row of RECIPES called `name`; UserError naming the choices when there is none: no silent fall-back."""
    try:
        return RECIPES[name]
    except KeyError:
        raise UserError(f"unknown method {name!r}; choose one of {', '.join(RECIPES)}") from None


def table() -> str:
    """RECIPES as a plain-text table, one row a method, a dot where it does not differ from the base."""
    columns = ["normalization", "kind", "clip_low", "clip_high", "drop_dead_groups"]
    base = Recipe(advantage="")
    rows = [["method", "advantage", *columns], ["(base)", "", *(str(getattr(base, c)) for c in columns)]]
    for name, r in RECIPES.items():
        params = ", ".join(f"{k}={v}" for k, v in r.advantage_params.items())
        different = r.differences()
        rows.append([name, f"{r.advantage}({params})", *(str(different.get(c, "·")) for c in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)
