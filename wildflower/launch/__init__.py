"""A run on its way: from an experiment file to processes that train, watched until they end."""
