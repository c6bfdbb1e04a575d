"""The table of areas. To add an area, write its file and add a line."""

from __future__ import annotations

from tests.soak.area import Area
from tests.soak.configs import Configs

AREAS: dict[str, type[Area]] = {
    "configs": Configs,
}
