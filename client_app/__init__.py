"""The ClientApp: trains and evaluates on a device within its budget."""
