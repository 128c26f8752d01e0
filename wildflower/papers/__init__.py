"""The five papers' tables and figures as experiments, and data that were made to try them on."""
