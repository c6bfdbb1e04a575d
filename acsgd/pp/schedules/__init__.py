"""Pipeline schedules as data: actions, lowering, validation, simulation. No torch."""
