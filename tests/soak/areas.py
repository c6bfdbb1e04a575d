"""The table of areas. To add an area, write its file and add a line."""

from __future__ import annotations

from tests.lib import scenes
from tests.lib.elastic_faults import SCENARIOS
from tests.soak import internet, storm
from tests.soak.area import Area
from tests.soak.caches import Caches
from tests.soak.checkpoints import Checkpoints
from tests.soak.configs import Configs
from tests.soak.data import Data
from tests.soak.faults import Faults
from tests.soak.hosts import ElasticHosts
from tests.soak.internet import Internet
from tests.soak.kills import Kills
from tests.soak.leases import Leases, LeasesOnFuse
from tests.soak.models import Models
from tests.soak.network import Network
from tests.soak.storm import Storm
from tests.soak.ties import Ties
from tests.soak.views import Views
from tests.soak.wire import Wire

AREAS: dict[str, type[Area]] = {
    "wire": Wire,
    "checkpoints": Checkpoints,
    "caches": Caches,
    "configs": Configs,
    "data": Data,
    "kills": Kills,
    "ties": Ties,
    "leases": Leases,
    "leases_on_fuse": LeasesOnFuse,
    "models": Models,
    "network": Network,
    "views": Views,
    "hosts": ElasticHosts,
    "faults": Faults,
    "storm": Storm,
    "internet": Internet,
}
NUM_CASES = {"faults": len(SCENARIOS), "storm": 1, "internet": 1}
"""Number of cases of areas that have a fixed one by default."""
COLUMNS = {"faults": scenes.COLUMNS, "storm": storm.COLUMNS, "internet": internet.COLUMNS}
"""Columns of areas that print a row per case."""
