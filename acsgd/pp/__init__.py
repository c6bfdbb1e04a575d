"""Pipeline parallelism: schedules as data, and the runtime that executes them.

Exports only what needs no torch. `simulate` is not exported because its module is also a command.
"""

from acsgd.pp.schedules.actions import Action, Op, Program, draw, forwards, parse_action
from acsgd.pp.schedules.lowering import lower
from acsgd.pp.schedules.schedules import SCHEDULES, Schedule
from acsgd.pp.schedules.validation import validate

__all__ = ["SCHEDULES", "Action", "Op", "Program", "Schedule", "draw", "forwards", "lower", "parse_action", "validate"]
