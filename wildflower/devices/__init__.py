"""Device reports, probes, fleets of simulated devices, the virtual clock, budgets."""
