"""The wildflower command."""
