"""Data sets, their partition over devices, and their metrics."""
