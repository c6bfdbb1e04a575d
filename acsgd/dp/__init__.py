"""How replicas agree. To add a mode, write its file and one line in the table; that also gets it tested."""

from __future__ import annotations

from acsgd.dp.allreduce import AllReduce

MODES = {"allreduce": AllReduce}
