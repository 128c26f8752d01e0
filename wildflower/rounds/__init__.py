"""The engine: the round, once for all methods. It knows the contract of a method and no method by name."""
