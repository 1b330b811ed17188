"""Choice of a layout: search, advice, calibration, tables, placement and export."""
