"""Profiles, traces, plots and measurements of a live engine."""
