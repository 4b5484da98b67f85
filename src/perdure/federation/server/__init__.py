"""The server's side of a federation: it asks nodes, and checks what they reply."""
