"""What the records say: fits, compute multipliers with intervals, figures, the report. No torch."""
