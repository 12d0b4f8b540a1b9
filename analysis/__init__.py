"""What the records say: fits, compute multipliers with intervals, figures and the report. Never imports torch."""
