"""The ServerApp: run configuration, evaluation, checkpoint, journal, report."""
