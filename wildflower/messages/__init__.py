"""Work orders and updates: all that server and client share on the wire."""
