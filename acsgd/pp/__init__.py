"""Pipeline parallelism: schedules as data, and what runs them.

Only what needs no torch is named here; `simulate` stays in its module, which is also a command.
"""

from acsgd.pp.actions import Action, Op, Program, draw, forwards, lower, parse_action
from acsgd.pp.laws import validate
from acsgd.pp.schedules import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "Action", "Op", "Program", "Schedule", "draw", "forwards", "lower", "parse_action", "validate"]
