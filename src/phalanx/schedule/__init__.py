"""Pipeline schedules: construction, validation and simulation."""
