"""Any PyTorch model, cut by itself: traced once on the server, and run on devices as a graph."""
